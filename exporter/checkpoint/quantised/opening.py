"""The quantised matrices of a checkpoint: its settings, and a computed tensor in place of each matrix's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.quantised.bitsandbytes import BITSANDBYTES
from vtx.exporter.checkpoint.quantised.compressed import COMPRESSED
from vtx.exporter.checkpoint.quantised.matrix import WEIGHT, MatrixParts, QuantisedFormat, Settings
from vtx.exporter.checkpoint.quantised.octets import FP8
from vtx.exporter.checkpoint.quantised.qweight import AWQ, GPTQ
from vtx.runtime.bundle.safetensors import TensorInfo, shown
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

KEY = "quantization_config"
METHOD = "quant_method"
METHODS: Mapping[str, QuantisedFormat] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "compressed-tensors": COMPRESSED,
    "fp8": FP8,
    "bitsandbytes": BITSANDBYTES,
}
PARTS = ("text_config", "llm_config", "vision_config")
GPTQ_FILE = "quantize_config.json"  # that older tools wrote beside config.json


def stated_settings(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Settings | None:
    """The checked settings of the quantisation that a configuration states, or else `GPTQ_FILE`; None if none does."""
    parts = (config, *(config.get(name) for name in PARTS))
    stated = [part.get(KEY) for part in parts if isinstance(part, dict)]
    stated.append(beside and {METHOD: "gptq", **beside})
    settings: Settings | None = next(filter(None, stated), None)
    if settings is None:
        return None
    method = settings.get(METHOD, KEY) if isinstance(settings, dict) else KEY
    if str(method) not in METHODS:
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({shown(str(method))[1:-1]}); vtx reads {', '.join(METHODS)}; "
            "use the unquantised checkpoint, or one of these"
        )
    METHODS[method].check(settings)
    return settings


def with_matrices(tensors: Mapping[str, TensorInfo], settings: Settings) -> dict[str, TensorInfo]:
    """The tensors with one of float32, whose rows are computed, in place of the parts of each quantised matrix.

    Raises CheckpointError for parts that are missing or do not fit each other.
    """
    method = settings[METHOD]
    form = METHODS[method]
    made = {name: info for name, info in tensors.items() if not name.endswith(form.unused)}
    stems = {name.removesuffix(end): None for end in form.markers for name in tensors if name.endswith(end)}
    for stem in stems:
        parts = {end: made.pop(stem + end) for end in form.ends if stem + end in made}
        name = stem + WEIGHT
        if name in made:
            raise CheckpointError(f"tensor {shown(name)} is both quantised and not; keep one of them")
        made[name] = form.matrix(settings, MatrixParts(method, stem, parts)).info(name)
    if not stems:
        raise CheckpointError(
            f"the configuration says {method}, but no tensor is quantised so; remove quantization_config from it, or "
            "download the weights again"
        )
    return made
