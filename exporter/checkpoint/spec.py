"""The manifest's sizes of a configuration, and back; sizes of a model for a plan.

Fields of the same name are copied, without a list of them. A flag of a decoder or a tower without a field of its own is
one of the manifest's `flags`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VisionConfig
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.loader import MAX_CONFIG, read_settings
from vtx.exporter.checkpoint.processor import ALONE, read_image_processor
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.spec.model_spec import ModelSpec, ProjectorSpec, TowerSpec
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layouts import read_layout
from vtx.tools.common.files import read_json_object
from vtx.tools.estimate.sizes import KNOWN, ModelSize, bundle_size, spec_size


def model_spec(config: ModelConfig, name: str) -> ModelSpec:
    text, vision = config.text, config.vision
    projector = ProjectorSpec(
        config.projector_width, config.projector_activation, config.projector_bias, config.projector_norm_eps,
        config.projector_layers, config.projector_widths, config.projector_rms,
    )  # fmt: skip
    tower = _tower_spec(vision, config.feature_layers, config.select)
    return ModelSpec(**_declared(text, ModelSpec), name=name, intermediate=text.ffn, tower=tower, projector=projector)


def _tower_spec(vision: VisionConfig, feature_layers: tuple[int, ...], select: str) -> TowerSpec:
    values = _declared(vision, TowerSpec)
    if (second := vision.beside) is not None:
        values |= {"beside": _tower_spec(second, (second.layers - 1,), "full")}
    if vision.towers:
        selected = ((tower, "default" if tower.class_token else "full") for tower in vision.towers)
        values |= {"towers": tuple(_tower_spec(tower, (tower.layers,), select) for tower, select in selected)}
    return TowerSpec(**values, intermediate=vision.ffn, feature_layers=feature_layers, select=select)


def config_of(manifest: Manifest) -> ModelConfig:
    """The part of a checkpoint's configuration that its bundle holds. Raises BundleError."""
    m, tower = manifest.model, manifest.model.tower
    config = ModelConfig(
        text=TextConfig(**_configured(m, TextConfig), ffn=m.intermediate),
        vision=_tower_config(tower),
        feature_layers=tower.feature_layers, select=tower.select, projector_activation=m.projector.activation,
        projector_bias=m.projector.bias, projector_norm_eps=m.projector.norm_eps, projector_layers=m.projector.layers,
        image_token_id=manifest.text.image_token_id, layout=read_layout(manifest.layout, tower), action=manifest.action,
        projector_widths=m.projector.widths, projector_rms=m.projector.rms_norm, bins=manifest.bins,
    )  # fmt: skip
    width = m.projector.intermediate
    return config if config.projector_width == width else replace(config, projector_hidden=width)


def _tower_config(tower: TowerSpec) -> VisionConfig:
    values = _configured(tower, VisionConfig)
    if tower.beside is not None:
        values |= {"beside": _tower_config(tower.beside)}
    if tower.towers:
        values |= {"towers": tuple(_tower_config(each) for each in tower.towers)}
    return VisionConfig(**values, ffn=tower.intermediate)


def _names(kind: type[TextConfig | VisionConfig | ModelSpec | TowerSpec]) -> set[str]:
    return {field.name for field in fields(kind)}


def _declared(part: TextConfig | VisionConfig, kind: type[ModelSpec | TowerSpec]) -> dict[str, Any]:
    """The values of `part` that have a field in the manifest, and its other flags."""
    shared = {name: getattr(part, name) for name in _names(kind) if hasattr(part, name)}
    others = sorted(_names(type(part)) - set(shared))
    return shared | {"flags": tuple(name for name in others if getattr(part, name) is True)}


def _configured(part: ModelSpec | TowerSpec, kind: type[TextConfig | VisionConfig]) -> dict[str, Any]:
    """The values that have a field in `kind`, and the flags that are set."""
    unknown = sorted(set(part.flags) - _names(kind))
    if unknown:
        raise BundleError(
            f"vtx.json: the flag {unknown[0]!r:.60} of the model is unknown to this vtx; "
            'upgrade it with pip install -U "vtx-edge"'
        )
    shared = {name: getattr(part, name) for name in _names(type(part)) & _names(kind)}
    return shared | dict.fromkeys(part.flags, True)


def find_size(model: str) -> ModelSize:
    """Sizes of a known name, of a bundle's directory, or of a checkpoint's directory or `config.json`."""
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model).expanduser()
    if (path / "vtx.json").is_file():
        return bundle_size(Bundle.open(path))

    config = path / "config.json" if path.is_dir() else path
    if not os.path.lexists(config):
        raise RequestError(
            f"{model!r} is not a known model ({', '.join(KNOWN)}) or a directory with a config.json or a bundle"
        )
    if not path.is_dir():
        return config_size(read_json_object(config, MAX_CONFIG), config.absolute().parent.name)
    settings = read_settings(path, "config.json")
    family = find_family(settings)
    parts = family.original.folders if family.original else {}
    own = {key: read_settings(path, f"{part}/config.json") for key, part in parts.items()}
    read = family.read({**settings, **{key: part for key, part in own.items() if part}})
    if family.adjust and any(os.path.lexists(path / name) for name in (ALONE, "processor_config.json")):
        read = family.adjust(read, read_image_processor(path))
    return model_size(read, path.absolute().name)


def config_size(config: Mapping[str, Any], name: str) -> ModelSize:
    """Sizes of a Hugging Face configuration, read as by the exporter; no weights are needed."""
    return model_size(read_config(config), name)


def model_size(config: ModelConfig, name: str) -> ModelSize:
    size = spec_size(model_spec(config, name), config.layout, "config").acting(config.action, config.bins)
    return size.with_towers(2) if config.video is not None and config.video.own_tower else size
