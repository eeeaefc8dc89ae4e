"""Small tensors that bundles keep next to the weights: rotary tables, scales of K and V, a newline, a norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import FINAL_NORM, KV_SCALES, NEWLINE, STATE
from vtx.runtime.errors import BundleError
from vtx.runtime.precision import PRECISIONS

Floats = NDArray[np.float32]
RopeTables = tuple[Floats, Floats]
NEWLINE_TENSOR = "newline"
WEIGHT = "weight"
BIAS = "bias"
MAX_HEADER = 1 << 18  # of two tensors a layer
MAX_GOLDEN = 1 << 28  # bytes: logits of 500 variants over a vocabulary of 128,000
LARGEST = "largest"  # [layers] float32: the largest magnitude in each layer on the golden prompt
FLOAT16_END = 65504.0


def read_rope(bundle: Bundle) -> dict[str, Floats]:
    """The rotary tables by name, each [max_context, head_dim / 2] of its layers. Raises BundleError."""
    m = bundle.manifest
    shapes = dict.fromkeys((names.COS, names.SIN), (m.max_context, m.model.head_dim // 2))
    if m.model.sliding is not None:
        shape = (m.max_context, m.model.sliding.head_dim // 2)
        shapes |= dict.fromkeys((names.SLIDING_COS, names.SLIDING_SIN), shape)
    return _read(bundle, m.rope, shapes)


def rope_at(tables: RopeTables, axes: Sequence[int], positions: NDArray[np.int64]) -> RopeTables:
    """Tables of n rows, one a token, for positions [n, 3]; each column is read at the part that `axes` names."""
    read_at = positions[:, axes]
    cos, sin = (np.ascontiguousarray(np.take_along_axis(table, read_at, 0)) for table in tables)
    return cos, sin


def read_kv_scales(bundle: Bundle) -> dict[str, Floats]:
    """`names.key_scale` and `names.value_scale` of each layer with K and V, each [1, kv_heads, 1, head_dim].

    Raises BundleError.
    """
    model = bundle.manifest.model
    cached = [layer for stage in bundle.manifest.stages for layer in stage.cached]
    shapes = {layer: (1, model.kv_heads, 1, model.heads_of(layer)) for layer in cached}
    parts = (names.key_scale, names.value_scale)
    scales = _read(bundle, KV_SCALES, {name(layer): shape for layer, shape in shapes.items() for name in parts})
    for name, scale in scales.items():
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise BundleError(f"{KV_SCALES}: {name} has a scale that is not a positive number; export again")
    return scales


def read_newline(bundle: Bundle) -> Floats:
    """The learned newline that some layouts put between an image's tokens, as one token [1, hidden]."""
    if NEWLINE not in bundle.manifest.files:
        raise BundleError(f"the bundle's image layout needs {NEWLINE}, which is not there; export again")
    return _read(bundle, NEWLINE, {NEWLINE_TENSOR: (bundle.manifest.model.hidden,)})[NEWLINE_TENSOR][None]


def read_state_projection(bundle: Bundle) -> tuple[Floats, Floats]:
    """The weight [hidden, state] and bias [hidden] that make a robot's state a token of the prompt."""
    m = bundle.manifest
    assert m.action is not None
    hidden = m.model.hidden
    tensors = _read(bundle, STATE, {WEIGHT: (hidden, m.action.state), BIAS: (hidden,)})
    return tensors[WEIGHT], tensors[BIAS]


def read_final_norm(bundle: Bundle) -> Floats:
    """The weight [hidden] of the decoder's last norm, for reductions that measure hidden states behind it."""
    return _read(bundle, FINAL_NORM, {WEIGHT: (bundle.manifest.model.hidden,)})[WEIGHT]


def _read(bundle: Bundle, file: str, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Tensors of these shapes, float32. Raises BundleError if one is missing or has another shape or type."""
    stored = bundle.arrays(file, MAX_HEADER + 4 * sum(map(prod, wanted.values())))
    for name, shape in wanted.items():
        if name not in stored or stored[name].shape != shape or stored[name].dtype != np.float32:
            raise BundleError(f"{file}: {name} is not a float32 tensor {shape}; export again")
    return {name: stored[name] for name in wanted}


def float16_overflow(bundle: Bundle) -> str | None:
    """The reason why graphs that compute in float16 would overflow, by the largest values at export; None if none.

    Graphs for CUDA and TensorRT compute in it. Bundles without that record pass. Raises BundleError.
    """
    m = bundle.manifest
    narrow = PRECISIONS[m.precision].arithmetic == "float16" and m.kv_dtype != "float32"
    largest = bundle.arrays(m.golden, MAX_GOLDEN).get(LARGEST) if narrow else None
    if largest is None or (most := float(np.max(largest))) <= FLOAT16_END:
        return None
    integers = PRECISIONS[m.precision].bits is not None
    wider = "--kv-precision fp32, which computes in float32" if integers else "--precision bf16"
    return (
        f"layer {int(np.argmax(largest)) + 1} reaches {most:,.0f} on the golden prompt, float16 ends at "
        f"{FLOAT16_END:,.0f}: graphs for GPUs would answer nonsense in it; export with {wider}"
    )
