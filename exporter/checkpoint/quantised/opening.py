"""The quantised matrices of a checkpoint: its settings, and a computed tensor in place of each matrix's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.quantised.awq import AWQ
from vtx.exporter.checkpoint.quantised.bitsandbytes import BITSANDBYTES
from vtx.exporter.checkpoint.quantised.compressed import COMPRESSED, MODELOPT
from vtx.exporter.checkpoint.quantised.fp8 import FP8
from vtx.exporter.checkpoint.quantised.gptq import GPTQ
from vtx.exporter.checkpoint.quantised.matrix import MatrixParts, QuantisedFormat, Settings
from vtx.runtime.bundle.safetensors import TensorInfo, shown
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

KEY, METHOD = "quantization_config", "quant_method"
METHODS: Mapping[str, QuantisedFormat] = {
    "awq": AWQ, "gptq": GPTQ, "compressed-tensors": COMPRESSED, "fp8": FP8, "bitsandbytes": BITSANDBYTES,
    "modelopt": MODELOPT,
}  # fmt: skip
# Files beside config.json that older tools wrote, and the method that each is of.
FILES = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}


def stated_settings(config: Mapping[str, Any]) -> Settings | None:
    """The checked settings of the quantisation that a configuration states, None if it states none."""
    for part in (config, config.get("text_config"), config.get("llm_config"), config.get("vision_config")):
        settings = part.get(KEY) if isinstance(part, dict) else None
        if settings:
            return _checked(settings)
    return None


def filed_settings(name: str, content: Mapping[str, Any]) -> Settings:
    """The checked settings of one of `FILES`."""
    inner = content.get("quantization")
    return _checked({METHOD: FILES[name], **(inner if isinstance(inner, dict) else content)})


def _checked(settings: Mapping[str, Any]) -> Settings:
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
    markers, unused = (tuple(f".{end}" for end in ends) for ends in (form.markers, form.unused))
    made = {name: info for name, info in tensors.items() if not name.endswith(unused)}
    stems = [name.removesuffix(end) for name in tensors for end in markers if name.endswith(end)]
    for stem in dict.fromkeys(stems):
        parts = {end: tensors[f"{stem}.{end}"] for end in form.ends if f"{stem}.{end}" in tensors}
        matrix = form.matrix(settings, MatrixParts(method, stem, parts))
        for end in parts:
            del made[f"{stem}.{end}"]
        name = f"{stem}.weight"
        if name in made:
            raise CheckpointError(f"tensor {shown(name)} is both quantised and not; keep one of them")
        made[name] = matrix.info(name)
    if not stems:
        raise CheckpointError(
            f"the configuration says {method}, but no tensor is quantised so; remove quantization_config from it, or "
            "download the weights again"
        )
    return made
