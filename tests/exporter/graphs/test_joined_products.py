"""Products with quantised matrices that have the same inputs: one in the dialects of GPUs, from one place in a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.runtime.bundle.safetensors import read_header

LAYERS = 2
GROUPED = Tiny(layers=LAYERS, text="qwen2")  # whose q, k and v have biases, and fewer heads of k and v
EQUAL = Tiny(layers=LAYERS, kv_heads=Tiny().heads)
DIALECTS = ("ort", "ort-cuda", "trt", "trt10", "plain")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tiny", "precision", "joined"),
    [(GROUPED, "int4", 4), (GROUPED, "int8", 4), (EQUAL, "int4", 4), (EQUAL, "int8", 6)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_q_k_and_v_are_one_product_and_so_are_gate_and_up(
    tiny: Tiny, precision: str, joined: int, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """But three equal int8 matrices, which TensorRT-RTX would dequantise by a kernel of its own."""
    bundle = export(tiny_checkpoint(tiny), tmp_path / "bundle", (), precision, dialects=DIALECTS)
    products = {}
    for dialect in DIALECTS:
        (stage,) = bundle.manifest.dialects[dialect].stages
        graph = onnx.load(bundle.path(stage), load_external_data=False).graph
        kinds = Counter(node.op_type for node in graph.node)
        products[dialect] = kinds["MatMulNBits"] + kinds["DequantizeLinear"]
    assert products == {d: LAYERS * (7 if d in ("ort", "plain") else joined) for d in DIALECTS}


def test_joined_matrices_lie_side_by_side_and_so_do_their_scales(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    bundle = export(tiny_checkpoint(GROUPED), tmp_path / "bundle", (), "int4", dialects=("ort", "trt"))
    places = {}
    for path in bundle.path("weights").glob("*.safetensors"):
        places |= read_header(path).tensors
    for part in ("", ".scales"):
        names = [f"text.layers.1.self_attn.{matrix}_proj.weight{part}" for matrix in "qkv"]
        infos = [places[name] for name in names]
        ends = np.cumsum([infos[0].offset, *(info.nbytes for info in infos)])
        assert [info.offset for info in infos] == ends[:-1].tolist()
