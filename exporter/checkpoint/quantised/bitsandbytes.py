"""bitsandbytes' NF4 and FP4: 4-bit entries of a table, in blocks of the flattened matrix.

`weight` holds two entries to a byte, the first in the high half; `weight.absmax` the scale of each block. Nested scales
are bytes, entries of `nested_quant_map` in blocks with `nested_absmax`, plus an offset.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vtx.exporter.checkpoint.quantised.matrix import Matrix, MatrixParts, QuantisedFormat, Rows, Settings
from vtx.runtime.bundle.safetensors import is_sizes, parse_json, read_bits
from vtx.runtime.errors import UnsupportedModelError

CODES, SCALES, OUTER = "weight", "weight.absmax", "weight.nested_absmax"
TABLE, OUTER_TABLE = "weight.quant_map", "weight.nested_quant_map"
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
MAX_STATE = 4096  # bytes; published ones have 150
BYTES = ("U8", "I8", "BF16", "F16", "F32")  # the types that the codes' bytes may be declared as
F32 = ("F32",)


def _check(settings: Settings) -> None:
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise UnsupportedModelError("quantization_config: load_in_4bit is not set; vtx reads bitsandbytes of 4 bits")


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    end = next((state for state in STATES if state in parts.tensors), STATES[0])
    state, codes = (parts.tensors.get(name) for name in (end, CODES))
    if state is None or state.nbytes > MAX_STATE or codes is None or codes.dtype not in BYTES:
        raise parts.error(end, f"or its weight is missing, or larger than {MAX_STATE:,} bytes")
    facts = parse_json(read_bits(state).tobytes(), f"tensor {parts.name}.{end}")
    shape, block, outer_block, offset = (
        facts.get(name) for name in ("shape", "blocksize", "nested_blocksize", "nested_offset")
    )
    nested = OUTER in parts.tensors
    sizes = [*(shape if isinstance(shape, list) else ()), block, *[outer_block] * nested]
    if len(sizes) != 3 + nested or not is_sizes(sizes) or 0 in sizes or sizes[1] % 2:
        raise parts.error(end, "has no sizes of a matrix and of blocks")
    rows, width = sizes[:2]
    if 2 * codes.nbytes != rows * width or (nested and not isinstance(offset, int | float)):
        raise parts.error(CODES, f"has {codes.nbytes:,} bytes, or no nested_offset, not those of {shape} weights")
    codes = replace(codes, dtype="U8", shape=(codes.nbytes,))
    blocks = -(-rows * width // block)
    scales, table = parts.need(SCALES, ("U8",) if nested else F32, (blocks,)), read_bits(parts.need(TABLE, F32, (16,)))
    if nested:
        largest = read_bits(parts.need(OUTER, F32, (-(-blocks // outer_block),)))
        outer_table = read_bits(parts.need(OUTER_TABLE, F32, (256,)))

    def part(first: int, last: int) -> Rows:
        begin, end = first * width, last * width
        octets = read_bits(codes, slice(begin // 2, end // 2))
        numbers = np.arange(begin // block, -(-end // block))
        steps = read_bits(scales, slice(begin // block, -(-end // block)))
        if nested:
            steps = outer_table[steps] * largest[numbers // outer_block] + np.float32(offset)
        of_weights = steps[np.arange(begin, end) // block - begin // block]
        entries = table[np.stack((octets >> 4, octets & 15), -1)]
        return Rows(entries.reshape(-1, width), of_weights.reshape(-1, width))

    return Matrix((rows, width), (codes, scales), part)


BITSANDBYTES = QuantisedFormat(_check, _matrix, (SCALES,), (CODES, SCALES, OUTER, TABLE, OUTER_TABLE, *STATES))
