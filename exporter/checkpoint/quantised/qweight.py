"""AWQ and GPTQ: words of `qweight`, `qzeros` [groups, out * bits / 32], and `scales` [groups, out].

AWQ's GEMM layout has 4 bits, and in `qweight` [in, out / 8] eight neighbouring rows to a word, in an order of its own
(AutoAWQ, awq/utils/packing_utils.py). GPTQ has 4 or 8 bits, in `qweight` [in * bits / 32, out] neighbouring inputs to a
word, and with an order of activations `g_idx` [in], a group for each input. GPTQ's first version stores zero points
less one; like GPTQModel, vtx adds it to whole words, so that it carries where one is 0.
"""

from __future__ import annotations

from dataclasses import replace

from vtx.exporter.checkpoint.quantised.matrix import (
    Matrix,
    MatrixParts,
    QuantisedFormat,
    Settings,
    check_setting,
    group_of,
)
from vtx.exporter.checkpoint.quantised.words import WORDS, WordLayout, word_matrix

BITS = 4  # of AWQ
ONES = {4: 0x11111111, 8: 0x01010101}  # a one for each zero point of a word of GPTQ
FORMAT = "checkpoint_format"
ENDS = CODES, SCALES, ZEROS, ORDER = ".qweight", ".scales", ".qzeros", ".g_idx"
IN_WORDS = WordLayout(CODES, SCALES, ZEROS, order=ORDER)
# A word holds rows 0, 2, 4, 6, 1, 3, 5, 7 of eight, from its lowest bits on.
IN_ROWS = WordLayout(CODES, SCALES, ZEROS, by_rows=True, places=(0, 4, 1, 5, 2, 6, 3, 7))


def _check_awq(settings: Settings) -> None:
    check_setting(settings, "bits", (BITS,))
    check_setting(settings, "version", ("gemm", None))


def _awq_matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    width, words = parts.need(CODES, WORDS).shape
    return word_matrix(parts, IN_ROWS, (8 * words, width), BITS, group_of(settings, width))


def _check_gptq(settings: Settings) -> None:
    check_setting(settings, "bits", tuple(ONES))
    check_setting(settings, FORMAT, ("gptq", "gptq_v2", None))
    check_setting(settings, "dynamic", (None, {}))


def _gptq_matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    bits = settings["bits"]
    words, rows = parts.need(CODES, WORDS).shape
    width = words * (32 // bits)
    if settings.get("desc_act"):
        parts.need(ORDER, WORDS, (width,))
    shift = 0 if settings.get(FORMAT) == "gptq_v2" else ONES[bits]
    return word_matrix(parts, replace(IN_WORDS, shift=shift), (rows, width), bits, group_of(settings, width))


AWQ = QuantisedFormat(_check_awq, _awq_matrix, (CODES,), ENDS[:3])
GPTQ = QuantisedFormat(_check_gptq, _gptq_matrix, (CODES,), ENDS)
