"""AWQ's GEMM layout: 4 bits, eight neighbouring rows to a word in an order of its own, and zero points.

`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out] (AutoAWQ, awq/utils/packing_utils.py).
"""

from __future__ import annotations

from vtx.exporter.checkpoint.quantised.matrix import (
    Matrix,
    MatrixParts,
    QuantisedFormat,
    Settings,
    check_setting,
    group_of,
)
from vtx.exporter.checkpoint.quantised.words import WORDS, WordLayout, word_matrix

BITS = 4
# A word holds rows 0, 2, 4, 6, 1, 3, 5, 7 of eight, from its lowest bits on.
LAYOUT = WordLayout("qweight", "scales", "qzeros", by_rows=True, places=(0, 4, 1, 5, 2, 6, 3, 7))


def _check(settings: Settings) -> None:
    check_setting(settings, "bits", (BITS,))
    check_setting(settings, "version", ("gemm", None))


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    width, words = parts.need(LAYOUT.codes, WORDS).shape
    return word_matrix(parts, LAYOUT, (8 * words, width), BITS, group_of(settings, "group_size", width))


AWQ = QuantisedFormat(_check, _matrix, (LAYOUT.codes,), (LAYOUT.codes, LAYOUT.scales, LAYOUT.zeros))
