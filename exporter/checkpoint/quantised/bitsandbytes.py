"""bitsandbytes' NF4 and FP4: 4-bit entries of a table, in blocks of the flattened matrix.

`weight` holds two entries to a byte, the first in the high half; `weight.absmax` the scale of each block. Nested scales
are bytes, entries of `nested_quant_map` in blocks with `nested_absmax`, plus an offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vtx.exporter.checkpoint.quantised.matrix import WEIGHT, Matrix, MatrixParts, QuantisedFormat, Rows, Settings
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.strict import Strict, optional
from vtx.tools.common.files import json_object

SCALES = ".weight.absmax"
OUTER = ".weight.nested_absmax"
TABLE = ".weight.quant_map"
OUTER_TABLE = ".weight.nested_quant_map"
STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
MAX_STATE = 4096  # bytes; published ones have 150
F32 = ("F32",)


def _check(settings: Settings) -> None:
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise UnsupportedModelError("quantization_config: load_in_4bit is not set; vtx reads bitsandbytes of 4 bits")


@dataclass(frozen=True, slots=True)
class State:
    """The facts of a quant_state that are needed."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = optional(1)
    nested_offset: float = optional(0.0)


def _state(parts: MatrixParts) -> State:
    end = next((state for state in STATES if state in parts.tensors), STATES[0])
    info = parts.tensors.get(end)
    if info is None or info.nbytes > MAX_STATE:
        raise parts.error(end, f"is missing, or larger than {MAX_STATE:,} bytes")
    name = f"tensor {parts.name}{end}"
    facts = json_object(read_bits(info).tobytes(), name)
    known = {key: facts[key] for key in State.__slots__ if key in facts}
    state = Strict(CheckpointError, "download the checkpoint again").read(State, known, name)
    if min(*state.shape, state.blocksize, state.nested_blocksize) < 1 or state.shape[1] % 2:
        raise parts.error(end, "has no sizes of a matrix and of blocks")
    return state


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    state = _state(parts)
    codes = parts.tensors.get(WEIGHT)
    rows, width = state.shape
    block = state.blocksize
    if codes is None or 2 * codes.nbytes != rows * width:
        raise parts.error(WEIGHT, f"does not hold {rows} x {width} weights")
    nested = OUTER in parts.tensors
    codes = replace(codes, dtype="U8", shape=(codes.nbytes,))
    blocks = -(-rows * width // block)
    scales = parts.need(SCALES, ("U8",) if nested else F32, (blocks,))
    table = read_bits(parts.need(TABLE, F32, (16,)))
    if nested:
        largest = read_bits(parts.need(OUTER, F32, (-(-blocks // state.nested_blocksize),)))
        outer_table = read_bits(parts.need(OUTER_TABLE, F32, (256,)))

    def part(first: int, last: int) -> Rows:
        begin = first * width
        end = last * width
        octets = read_bits(codes, slice(begin // 2, end // 2))
        of_rows = slice(begin // block, -(-end // block))
        steps = read_bits(scales, of_rows)
        if nested:
            outer = np.arange(of_rows.start, of_rows.stop) // state.nested_blocksize
            steps = outer_table[steps] * largest[outer] + np.float32(state.nested_offset)
        of_weights = steps[np.arange(begin, end) // block - begin // block].reshape(-1, width)
        entries = table[np.stack((octets >> 4, octets & 15), -1)].reshape(-1, width)
        return Rows(entries, of_weights, np.zeros(entries.shape, np.int8))

    return Matrix((rows, width), (codes, scales), part)


BITSANDBYTES = QuantisedFormat(_check, _matrix, (SCALES,), (WEIGHT, SCALES, OUTER, TABLE, OUTER_TABLE, *STATES))
