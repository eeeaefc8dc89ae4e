"""The manifest's facts and parts of a configuration, and back; sizes of a model for a plan.

Fields of the same name are copied, without a list of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.processor import ALONE, read_image_processor
from vtx.exporter.checkpoint.settings import MAX_CONFIG, read_settings
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.spec.model_spec import ModelParts, ModelSpec
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import Strict, json_value
from vtx.runtime.vision.layouts import read_layout
from vtx.tools.common.files import read_json_object
from vtx.tools.estimate.sizes import KNOWN, ModelSize, bundle_size, decoder_of, text_values, vision_of, vision_size
from vtx.tools.model.vision import VisionModel


def model_spec(config: ModelConfig, name: str) -> ModelSpec:
    declared = {field.name for field in fields(ModelSpec)}
    text = replace(config.text, factors=(), shifts=())  # a bundle holds weights after these
    parts = ModelParts(
        text={key: value for key, value in json_value(text).items() if key not in declared},
        vision=json_value(vision_model(config)),
    )
    facts = {field.name: getattr(text, field.name) for field in fields(text) if field.name in declared}
    return ModelSpec(**facts, name=name, tower=config.facts(), parts=parts)


def vision_model(config: ModelConfig) -> VisionModel:
    """The configuration's tower and projector alone."""
    return VisionModel(**{field.name: getattr(config, field.name) for field in fields(VisionModel)})


def config_of(manifest: Manifest) -> ModelConfig:
    """The part of a checkpoint's configuration that its bundle holds. Raises BundleError."""
    vision = vision_of(manifest.model)
    values = {field.name: getattr(vision, field.name) for field in fields(vision)}
    return ModelConfig(
        **values,
        text=Strict().read(TextConfig, text_values(manifest.model), "vtx.json: model.parts.text"),
        image_token_id=manifest.text.image_token_id,
        layout=read_layout(manifest.layout, manifest.model.tower),
        action=manifest.action,
        bins=manifest.bins,
    )


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
    settings_of = {key: read_settings(path, f"{part}/config.json") for key, part in parts.items()}
    read = family.read({**settings, **{key: part for key, part in settings_of.items() if part}})
    if family.adjust and any(os.path.lexists(path / name) for name in (ALONE, "processor_config.json")):
        read = family.adjust(read, read_image_processor(path))
    return model_size(read, path.absolute().name)


def config_size(config: Mapping[str, Any], name: str) -> ModelSize:
    """Sizes of a Hugging Face configuration, read as by the exporter; no weights are needed."""
    return model_size(read_config(config), name)


def model_size(config: ModelConfig, name: str) -> ModelSize:
    decoder = decoder_of(json_value(config.text))
    vision = vision_size(vision_model(config), config.layout, decoder.hidden)
    size = ModelSize(name, "config", decoder, vision, config.layout).acting(config.action, config.bins)
    return size.with_towers(2) if config.video is not None and config.video.own_tower else size
