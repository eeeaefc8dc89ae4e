"""compressed-tensors: integers packed into words, or a byte a weight (int8, FP8).

Packed: `weight_packed` [out, in * bits / 32], `weight_scale` [out, groups], `weight_shape` [2], of schemes that are not
symmetric `weight_zero_point` [out * bits / 32, groups], and with an order of activations `weight_g_idx` [in].
"""

from __future__ import annotations

from typing import Any

from vtx.exporter.checkpoint.quantised.matrix import (
    FLOATS,
    WEIGHT,
    Matrix,
    MatrixParts,
    QuantisedFormat,
    Settings,
    check_setting,
)
from vtx.exporter.checkpoint.quantised.octets import block_of, octet_matrix
from vtx.exporter.checkpoint.quantised.words import WORDS, WordLayout, word_matrix
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.errors import UnsupportedModelError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
LAYOUT = WordLayout(
    ".weight_packed", ".weight_scale", ".weight_zero_point", turned=False, zeroed=False, order=".weight_g_idx"
)
SHAPE = ".weight_shape"
ACTIVATIONS = tuple(
    f".{part}_{kind}" for part in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")
)


def _check(settings: Settings) -> None:
    check_setting(settings, "format", FORMATS)
    check_setting(settings, "transform_config", (None, {}))
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(f"quantization_config: sparsity_config is {sparsity!r:.60}; vtx reads dense ones")
    for weights in _weights(settings):
        check_setting(weights, "num_bits", (4, 8))


def _weights(settings: Settings) -> list[dict[str, Any]]:
    """The settings of weights, for each group of modules."""
    groups = settings.get("config_groups")
    entries = groups.values() if isinstance(groups, dict) else ()
    weights = [entry.get("weights") for entry in entries if isinstance(entry, dict)]
    return [part for part in weights if isinstance(part, dict)]


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    if LAYOUT.codes not in parts.tensors:
        block = next((part["block_structure"] for part in _weights(settings) if part.get("block_structure")), None)
        return octet_matrix(parts, LAYOUT.scales, block_of(block), LAYOUT.zeros)
    _, words = parts.need(LAYOUT.codes, WORDS).shape
    _, groups = parts.need(LAYOUT.scales, FLOATS).shape
    rows, width = read_bits(parts.need(SHAPE, ("I64", "I32"), (2,))).tolist()
    bits = 8 if words > -(-width // 8) else 4
    if rows < 1 or width < 1 or width % groups:
        raise parts.error(LAYOUT.scales, f"has {groups} groups for {width} inputs, not equal ones")
    return word_matrix(parts, LAYOUT, (rows, width), bits, width // groups)


_ENDS = (WEIGHT, LAYOUT.codes, LAYOUT.scales, LAYOUT.zeros, SHAPE, LAYOUT.order)
COMPRESSED = QuantisedFormat(_check, _matrix, (LAYOUT.codes, LAYOUT.scales), _ENDS, ACTIVATIONS)
