"""FP8 with a scale for a block of rows and columns (DeepSeek, Qwen), or for the whole matrix.

`weight` F8_E4M3 [out, in], `weight_scale_inv` [blocks of rows, blocks of columns]: a weight is the product of both.
"""

from __future__ import annotations

from vtx.exporter.checkpoint.quantised.matrix import Format, Matrix, Parts, Settings, check_setting
from vtx.exporter.checkpoint.quantised.octets import octet_matrix
from vtx.runtime.errors import UnsupportedModelError

BLOCK = (128, 128)
SCALE = "weight_scale_inv"


def _check(settings: Settings) -> None:
    check_setting(settings, ("fmt",), ("e4m3",), "e4m3")
    block_of(settings.get("weight_block_size"))


def block_of(sizes: object) -> tuple[int, int] | None:
    """The rows and columns of a block as a quantization_config states them; None if it does not."""
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModelError(f"quantization_config: a block is {sizes!r:.40}; vtx reads [rows, columns]")
    return sizes[0], sizes[1]


def _matrix(settings: Settings, parts: Parts) -> Matrix:
    return octet_matrix(parts, SCALE, block_of(settings.get("weight_block_size")) or BLOCK)


FP8 = Format(_check, _matrix, (SCALE,), ("weight", SCALE), ("input_scale", "activation_scale"))
