"""Sizes of a model for a plan: by a known name, a bundle, or a checkpoint's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.loader import MAX_CONFIG, read_json_object, read_settings
from vtx.exporter.checkpoint.processor import ALONE, read_image_processor
from vtx.exporter.checkpoint.spec import model_spec
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import RequestError
from vtx.tools.estimate.sizes import KNOWN, ModelSize, bundle_size, spec_size


def find_size(model: str) -> ModelSize:
    """Sizes of a known name, of a bundle's directory, or of a checkpoint's directory or `config.json`.

    Raises RequestError if `model` is none of these (the message lists the known names); BundleError for a damaged
    bundle; CheckpointError for a damaged configuration, or one that vtx does not export.
    """
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
    read = family.read({**settings, **own})
    if family.adjust and any(os.path.lexists(path / name) for name in (ALONE, "processor_config.json")):
        read = family.adjust(read, read_image_processor(path))
    return model_size(read, path.absolute().name)


def config_size(config: Mapping[str, Any], name: str) -> ModelSize:
    """Sizes of a Hugging Face configuration, read as by the exporter; no weights are needed."""
    return model_size(read_config(config), name)


def model_size(config: ModelConfig, name: str) -> ModelSize:
    """Sizes of a configuration that the exporter has read."""
    return spec_size(model_spec(config, name), config.layout, "config")
