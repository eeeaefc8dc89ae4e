"""GPTQ's layout: 4 or 8 bits, neighbouring inputs to a word, and with an order of activations a group for each input.

`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out], `g_idx` [in]. The first
version stores zero points less one; like GPTQModel, vtx adds it to whole words, so that it carries where one is 0.
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

ONES = {4: 0x11111111, 8: 0x01010101}  # a one for each zero point of a word
FORMAT = "checkpoint_format"
LAYOUT = WordLayout("qweight", "scales", "qzeros", order="g_idx")


def _check(settings: Settings) -> None:
    check_setting(settings, "bits", tuple(ONES))
    check_setting(settings, FORMAT, ("gptq", "gptq_v2", None))
    check_setting(settings, "dynamic", (None, {}))


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    bits = settings["bits"]
    words, rows = parts.need(LAYOUT.codes, WORDS).shape
    width = words * (32 // bits)
    if settings.get("desc_act"):
        parts.need(LAYOUT.order, WORDS, (width,))
    group = group_of(settings, "group_size", width)
    shift = 0 if settings.get(FORMAT) == "gptq_v2" else ONES[bits]
    layout = replace(LAYOUT, shift=shift, symmetric=settings.get("sym") is True)
    return word_matrix(parts, layout, (rows, width), bits, group)


GPTQ = QuantisedFormat(_check, _matrix, (LAYOUT.codes,), (LAYOUT.codes, LAYOUT.scales, LAYOUT.zeros, LAYOUT.order))
