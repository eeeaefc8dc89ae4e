"""The memory of a build, and the graphs that a device has it for."""

from __future__ import annotations

import pytest

from vtx.runtime.host.profiles import load_profile
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import precisions_of
from vtx.tools.tensorrt.memory import BUILDER_MEMORY, build_memory, buildable_layers

LLAVA = KNOWN["llava-1.5-7b"]


@pytest.mark.parametrize(
    ("device", "precision", "layers"),
    [("orin-nano-8", "int4", 11), ("orin-nx-16", "int4", 27), ("agx-orin-32", "fp16", 15), ("agx-orin-64", "fp16", 32)],
)
def test_a_device_has_the_memory_to_build_so_many_layers_and_not_one_more(
    device: str, precision: str, layers: int
) -> None:
    """202.4 million weights a layer, in int4 with a scale of two bytes for each block of 64."""
    usable = load_profile(device).usable_bytes
    assert buildable_layers(LLAVA, precisions_of(LLAVA, precision), usable) == layers
    layer = 202_375_168 * (2 if precision == "fp16" else 0.5 + 2 / 64)
    assert BUILDER_MEMORY + 5 * layers * layer <= usable
    assert layers == LLAVA.decoder.layers or BUILDER_MEMORY + 5 * (layers + 1) * layer > usable


def test_where_not_one_layer_can_be_built_there_are_none() -> None:
    assert buildable_layers(LLAVA, precisions_of(LLAVA, "fp32"), build_memory(1 << 20, 2)) == 0
