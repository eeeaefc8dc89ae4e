"""FP8 with a scale for a block of rows and columns (DeepSeek, Qwen), or for the whole matrix.

`weight` F8_E4M3 [out, in], `weight_scale_inv` [blocks of rows, blocks of columns]: a weight is the product of both.
"""

from __future__ import annotations

from vtx.exporter.checkpoint.quantised.matrix import Matrix, MatrixParts, QuantisedFormat, Settings, check_setting
from vtx.exporter.checkpoint.quantised.octets import block_of, octet_matrix

SCALE = "weight_scale_inv"


def _check(settings: Settings) -> None:
    check_setting(settings, "fmt", ("e4m3", None))
    block_of(settings.get("weight_block_size"))


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    return octet_matrix(parts, SCALE, block_of(settings.get("weight_block_size", [128, 128])))


FP8 = QuantisedFormat(_check, _matrix, (SCALE,), ("weight", SCALE), ("input_scale", "activation_scale"))
