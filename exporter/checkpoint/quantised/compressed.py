"""compressed-tensors: integers packed into words, or a byte a weight (int8, FP8), and ModelOpt's FP8, alike.

Packed: `weight_packed` I32 [out, in * bits / 32], `weight_scale` [out, groups], `weight_shape` [2], and of schemes that
are not symmetric `weight_zero_point` I32 [out * bits / 32, groups]; with an order of activations `weight_g_idx` [in].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.fp8 import block_of
from vtx.exporter.checkpoint.quantised.matrix import (
    FLOATS,
    Floats,
    Format,
    Matrix,
    Parts,
    Settings,
    centred,
    check_setting,
    floats,
    stored_dtype,
    unpacked,
)
from vtx.exporter.checkpoint.quantised.octets import octet_matrix
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
BITS = (4, 8)
WHOLE = ("I64", "I32")
ABOUT_ACTIVATIONS = tuple(
    f"{part}_{kind}" for part in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")
)


def _check(settings: Settings) -> None:
    check_setting(settings, ("format",), FORMATS, None)
    for name in ("transform_config", "sparsity_config"):
        part = settings.get(name)
        if isinstance(part, dict) and part and part.get("format", "sparse") != "dense":
            raise UnsupportedModelError(f"quantization_config: {name} is not supported; use another checkpoint of it")
    for group in _groups(settings):
        check_setting(group, ("num_bits",), BITS, None)


def _groups(settings: Settings) -> list[Any]:
    """What the settings say of weights, for each group of modules."""
    groups = settings.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    weights = [entry.get("weights") for entry in entries if isinstance(entry, dict)]
    return [part for part in weights if isinstance(part, dict)]


def _matrix(settings: Settings, parts: Parts) -> Matrix:
    zero_point = "weight_zero_point"
    if "weight_packed" not in parts.tensors:
        block = next((part["block_structure"] for part in _groups(settings) if part.get("block_structure")), None)
        return octet_matrix(parts, "weight_scale", block_of(block), zero_point if zero_point in parts.tensors else None)
    codes, (rows, words) = parts.table("weight_packed", ("I32",))
    shape = [int(size) for size in read_bits(parts.need("weight_shape", WHOLE, (2,)))]
    bits = next((bits for bits in BITS if shape == [rows, shape[1]] and -(-shape[1] * bits // 32) == words), None)
    if bits is None:
        raise CheckpointError(
            f"tensor {parts.name}.weight_packed has shape {[rows, words]}, which is not that of {shape} weights of "
            f"{' or '.join(map(str, BITS))} bits"
        )
    width = shape[1]
    scales, (_, groups) = parts.table("weight_scale", FLOATS)
    parts.need("weight_scale", FLOATS, (rows, groups))
    if width % groups:
        raise CheckpointError(f"tensor {parts.name}.weight_scale has {groups} groups of {width} inputs, not equal ones")
    word, group = 32 // bits, width // groups
    zeros = None
    if zero_point in parts.tensors:
        zeros = parts.need(zero_point, ("I32",), (-(-rows // word), groups))
    columns = None
    if "weight_g_idx" in parts.tensors:
        columns = read_bits(parts.need("weight_g_idx", WHOLE, (width,))).astype(np.int64)
        if columns.min() < 0 or columns.max() >= groups:
            raise CheckpointError(f"tensor {parts.name}.weight_g_idx names group {columns.max()}, there are {groups}")
        columns = None if np.array_equal(columns, np.arange(width) // group) else columns

    def steps(first: int, last: int) -> tuple[Floats, NDArray[np.int8] | None]:
        step = floats(scales, slice(first, last))
        if zeros is None:
            return step, None
        packed = np.ascontiguousarray(read_bits(zeros, slice(first // word, -(-last // word))))[..., None]
        points = unpacked(packed, bits).transpose(0, 2, 1).reshape(-1, groups)[: last - first]
        return step, centred(np.ascontiguousarray(points), bits)

    def integers(first: int, last: int) -> NDArray[np.int8]:
        every = unpacked(read_bits(codes, slice(first, last)), bits)[:, :width]
        return centred(np.ascontiguousarray(every), bits)

    held = (codes, scales) if zeros is None else (codes, scales, zeros)
    scheme = Scheme(stored_dtype(bits), group) if columns is None else None
    return Matrix(parts.weight, (rows, width), held, integers, steps, word, columns, scheme)


def _check_modelopt(settings: Settings) -> None:
    check_setting(settings, ("quant_algo",), ("fp8",), None)


_ENDS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
COMPRESSED = Format(_check, _matrix, ("weight_packed", "weight_scale"), _ENDS, ABOUT_ACTIVATIONS)
MODELOPT = Format(_check_modelopt, _matrix, ("weight_scale",), ("weight", "weight_scale"), ABOUT_ACTIVATIONS)
