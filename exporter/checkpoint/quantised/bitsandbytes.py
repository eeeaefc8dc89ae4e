"""bitsandbytes: 4-bit entries of a table (NF4, FP4) in blocks of the flattened matrix, and int8 with a scale a row.

`weight` holds two entries to a byte, the first in the high half; `weight.absmax` the scale of each block. Nested scales
are bytes, entries of `nested_quant_map` in blocks with `nested_absmax`, plus an offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.matrix import Floats, Format, Matrix, Parts, Settings, floats
from vtx.exporter.checkpoint.quantised.octets import octet_matrix
from vtx.runtime.bundle.safetensors import is_sizes, parse_json, read_bits
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

KINDS = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"
MAX_STATE = 4096  # bytes; published ones have 150
LARGEST = 127  # of the integers of a row


def _check(settings: Settings) -> None:
    kinds = ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit")
    if not any(settings.get(kind) for kind in kinds):
        raise UnsupportedModelError("quantization_config: neither load_in_4bit nor load_in_8bit is set")


def _matrix(settings: Settings, parts: Parts) -> Matrix:
    if "SCB" in parts.tensors:
        return octet_matrix(parts, "SCB", None, factor=1 / LARGEST)
    end = next((STATE + kind for kind in KINDS if STATE + kind in parts.tensors), STATE + KINDS[0])
    state = parts.need(end, ("U8",))
    if state.nbytes > MAX_STATE:
        raise CheckpointError(f"tensor {parts.name}.{end} has {state.nbytes:,} bytes, the limit is {MAX_STATE:,}")
    facts = parse_json(read_bits(state).tobytes(), f"tensor {parts.name}.{end}")
    shape, block = (facts.get("shape"), facts.get("blocksize")) if isinstance(facts, dict) else (None, None)
    if not is_sizes(shape) or len(shape) != 2 or type(block) is not int or block < 1 or prod(shape) % 2:
        raise CheckpointError(f"tensor {parts.name}.{end} has no shape of two sizes, or no blocksize")
    rows, width = shape
    codes = parts.need("weight", ("U8", "I8", "BF16", "F16", "F32"))
    if 2 * codes.nbytes != rows * width or width % 2:
        raise CheckpointError(f"tensor {parts.name}.weight has {codes.nbytes:,} bytes, 4 bits of {shape} are others")
    codes = replace(codes, dtype="U8", shape=(codes.nbytes,))
    table = floats(parts.need("weight.quant_map", ("F32",), (16,)))
    blocks = -(-rows * width // block)
    scales = _scales(parts, facts, blocks)

    def values(first: int, last: int) -> Floats:
        octets = read_bits(codes, slice(first * width // 2, last * width // 2))
        numbers: Floats = table[np.stack((octets >> 4, octets & 15), -1)].reshape(last - first, width)
        return numbers

    def steps(first: int, last: int) -> tuple[Floats, None]:
        begin, end = first * width, last * width
        part = scales(begin // block, -(-end // block))
        if width % block == 0:
            return part.reshape(last - first, -1), None
        return part[np.arange(begin, end) // block - begin // block].reshape(last - first, width), None

    return Matrix(parts.weight, (rows, width), (codes, parts.tensors["weight.absmax"]), values, steps)


def _scales(parts: Parts, facts: Mapping[str, Any], blocks: int) -> Any:
    """A function that reads the scales of the blocks from a first one up to another."""
    if "weight.nested_absmax" not in parts.tensors:
        plain = parts.need("weight.absmax", ("F32",), (blocks,))
        return lambda first, last: floats(plain, slice(first, last))
    entries = parts.need("weight.absmax", ("U8",), (blocks,))
    table = floats(parts.need("weight.nested_quant_map", ("F32",), (256,)))
    size, offset = facts.get("nested_blocksize"), facts.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise CheckpointError(f"the quant_state of tensor {parts.weight} has no nested_blocksize or nested_offset")
    outer = floats(parts.need("weight.nested_absmax", ("F32",), (-(-blocks // size),)))

    def nested(first: int, last: int) -> NDArray[np.float32]:
        inner = table[read_bits(entries, slice(first, last))]
        return inner * outer[np.arange(first, last) // size] + np.float32(offset)

    return nested


_ENDS = tuple(f"weight.{end}" for end in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))
BITSANDBYTES = Format(
    _check, _matrix, ("weight.absmax", "SCB"), ("weight", "SCB", *_ENDS, *(STATE + kind for kind in KINDS)),
    ("weight_format",),
)  # fmt: skip
