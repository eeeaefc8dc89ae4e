"""The family of a checkpoint, and the families that are known but not exported, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import vtx.exporter.checkpoint.families as package
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.family import Family
from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.modules import modules_of

# Every file of this folder and its subfolders that declares a `FAMILY`.
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in modules_of(package) if hasattr(module, "FAMILY"))
# Known, and not exported: the missing part, by model_type or architecture.
REFUSED: Mapping[str, str] = {
    "gemma3n": "its tower is a MobileNetV5 and its decoder keeps several hidden states of each token, which vtx does "
    "not build; use Gemma 4 E2B or E4B",
    "gemma4_unified": "it has no vision tower, and the tokens of an image see each other only in layers with a "
    "window; use Gemma 4 E2B or E4B",
    "lfm2-vl": "this is LFM2-VL's first form, with code of its own; use its current revision, of model_type lfm2_vl",
    "minicpmv4_7": "its images and the marks around their slices have places on a canvas, which vtx does not give "
    "them; use MiniCPM-V 4.6",
}


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by the architecture and the model_type of its `config.json`."""
    kind = config.get("model_type")
    names = _architectures(config)
    if kind is None and isinstance(config.get("type"), str) and "input_features" in config:
        policies = {family.policy: family for family in FAMILIES if family.policy is not None}
        if config["type"] in policies:
            return policies[config["type"]]
        raise UnsupportedModelError(
            f"config.json is of LeRobot's policy {shown(config['type'])}; vtx exports {', '.join(policies)}"
        )
    for family in FAMILIES:
        if (kind, *names) in family.spellings:
            return family
        of_kind = kind == family.model_type or (family.original is not None and names)
        if of_kind and (not names or names == [family.architecture]):
            return family
    raise _refusal(kind, names)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("architectures")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _refusal(kind: Any, names: Sequence[str]) -> UnsupportedModelError:
    """The error of a model that no family exports."""
    subject = f"model_type {shown(str(kind))} ({shown(', '.join(names))[1:-1] or 'no architecture'})"
    for name in (kind, *names):
        if isinstance(name, str) and name in REFUSED:
            return UnsupportedModelError(f"{subject} is not supported: {REFUSED[name]}")
    original = kind == "llava_llama" or any(re.match(r"Llava\w*(Llama|Mistral|Mpt|Qwen)", name) for name in names)
    hint = ". It has the original LLaVA layout with an unsupported decoder; use the -hf checkpoint" * original
    return UnsupportedModelError(
        f"the checkpoint is {subject}; vtx exports {', '.join(family.architecture for family in FAMILIES)}{hint}"
    )


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a model's graphs, from its `config.json`. Raises UnsupportedModelError, CheckpointError."""
    return find_family(config).read(config)
