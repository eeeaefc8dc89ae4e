"""GPTQ's layout: 4 or 8 bits, neighbouring inputs to a word, a group for each input.

`qweight` I32 [in * bits / 32, out], `qzeros` I32 [groups, out * bits / 32], `scales` [groups, out], `g_idx` I32 [in].
The first version stores zero points less one; GPTQModel adds it to the whole word, carries included, and so does vtx.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.matrix import (
    FLOATS,
    Floats,
    Format,
    Matrix,
    Parts,
    Settings,
    centred,
    check_setting,
    columns_of,
    float_columns,
    group_of,
    stored_dtype,
    unpacked,
)
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

ONES = {4: 0x11111111, 8: 0x01010101}  # a one for each zero point of a word
V2 = "gptq_v2"


def _check(settings: Settings) -> None:
    check_setting(settings, ("bits",), tuple(ONES), None)
    check_setting(settings, ("checkpoint_format", "format"), ("gptq", V2), "gptq")
    if settings.get("dynamic"):
        raise UnsupportedModelError(
            "quantization_config: dynamic gives modules bits and groups of their own; vtx reads one of each; use "
            "another checkpoint of the model"
        )


def _matrix(settings: Settings, parts: Parts) -> Matrix:
    bits = settings["bits"]
    word = 32 // bits
    codes, (words, rows) = parts.table("qweight", ("I32",))
    width = words * word
    group = group_of(settings, ("group_size",), width)
    groups = -(-width // group)
    scales = parts.need("scales", FLOATS, (groups, rows))
    if rows % word:
        raise CheckpointError(f"tensor {parts.name}.qweight has {rows} outputs, not a multiple of {word}")
    zeros = parts.need("qzeros", ("I32",), (groups, rows // word))
    shift = 0 if (settings.get("checkpoint_format") or settings.get("format")) == V2 else ONES[bits]
    order = _order(settings, parts, width, groups)
    in_order = order is None or np.array_equal(order, np.arange(width) // group)
    even = in_order and width % group == 0

    def steps(first: int, last: int) -> tuple[Floats, NDArray[np.int8]]:
        packed = columns_of(zeros, first // word, last // word).view(np.uint32) + np.uint32(shift)  # [words, groups]
        points = unpacked(packed[..., None], bits).transpose(0, 2, 1).reshape(last - first, -1)
        return float_columns(scales, first, last), centred(np.ascontiguousarray(points), bits)

    return Matrix(
        parts.weight, (rows, width), (codes, scales, zeros),
        lambda first, last: centred(unpacked(columns_of(codes, first, last), bits), bits), steps, word,
        None if even else (np.arange(width) // group if in_order else order),
        Scheme(stored_dtype(bits), group) if even else None,
    )  # fmt: skip


def _order(settings: Settings, parts: Parts, width: int, groups: int) -> NDArray[np.int64] | None:
    """The group of each input, None if the checkpoint does not say."""
    if "g_idx" not in parts.tensors and not settings.get("desc_act"):
        return None
    order: NDArray[np.int64] = read_bits(parts.need("g_idx", ("I32", "I64"), (width,))).astype(np.int64)
    if order.min() < 0 or order.max() >= groups:
        raise CheckpointError(f"tensor {parts.name}.g_idx names group {order.max()}, there are {groups}")
    return order


GPTQ = Format(_check, _matrix, ("qweight",), ("qweight", "qzeros", "scales", "g_idx"))
