"""The vision tower of a checkpoint that only names it: found, opened and checked as a checkpoint of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from vtx.exporter.checkpoint.config import VISION_FAMILIES
from vtx.exporter.checkpoint.loader import Checkpoint, canonical_name, checkpoint_files, is_plain_path, open_model
from vtx.exporter.checkpoint.original.known_towers import (
    CLIP_L_336,
    CLIP_L_336_CONFIG,
    CLIP_L_336_PROCESSOR,
    INTERNVIT,
    INTERNVIT_TENSORS,
    internvit_config,
    internvit_processor,
    thirds,
)
from vtx.exporter.checkpoint.processor import read_image_processor
from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class NamedTower:
    """`config` as `vision_config` has it, its image processor's configuration, and its tensors, if it was found."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    checkpoint: Checkpoint | None
    origin: str


def find_tower(name: str, given: str | None, model: Checkpoint, *, weights: bool, allow_pickle: bool) -> NamedTower:
    """The tower called `name` by the checkpoint `model`; `given` by the user comes first.

    Without `weights` the checkpoint holds those itself.

    Raises:
        CheckpointError: it is damaged, hostile, or not found; the message says how to give it.
        UnsupportedModelError: it is no tower that vtx exports.

    """
    if given is None and not weights and name == CLIP_L_336:
        return NamedTower(CLIP_L_336_CONFIG, CLIP_L_336_PROCESSOR, None, "the checkpoint itself")
    address = given if given is not None else _inside(name, model)
    try:
        found = open_model(
            address or _hub_id(name), _check_tower, _tower_name, weights=weights, allow_pickle=allow_pickle
        )
    except UnsupportedModelError:
        raise
    except CheckpointError as cause:
        if address is not None:
            raise CheckpointError(f"the vision tower: {cause}") from cause
        raise CheckpointError(
            f"the checkpoint has no vision tower, it names {shown(name)}, and that is not in its folder "
            f"({cause}); give the tower's directory with --tower PATH"
        ) from cause
    if found.config.get("model_type") == INTERNVIT:
        found = replace(found, tensors=dict(thirds(found.tensors)))
        return NamedTower(internvit_config(found.config, name), internvit_processor(name), found, str(found.folder))
    config = found.config.get("vision_config", found.config)
    kind = _kind(found.config)
    return NamedTower({**config, "model_type": kind}, read_image_processor(found.folder), found, str(found.folder))


def _tower_name(name: str) -> str:
    """The canonical name of a tower's tensor."""
    for pattern, part in INTERNVIT_TENSORS:
        renamed, found = re.subn(pattern, part, name)
        if found:
            return renamed
    return canonical_name(name)


def _inside(name: str, model: Checkpoint) -> str | None:
    """A folder of that name, or of its last part, inside the checkpoint. Other places of the disk are the user's."""
    for part in (name, PurePosixPath(name).name):
        if part and is_plain_path(part) and checkpoint_files(model.folder).exists(f"{part}/config.json"):
            return str(model.folder / part)
    return None


def _hub_id(name: str) -> str:
    """`name`, which the hub alone is asked for: a checkpoint says nothing about other places of this disk."""
    if not is_plain_path(name) or name.count("/") != 1:
        raise CheckpointError("it is a path of the machine that it was trained on")
    return name


def _check_tower(config: Mapping[str, Any]) -> None:
    if _kind(config) not in VISION_FAMILIES and config.get("model_type") != INTERNVIT:
        raise UnsupportedModelError(
            f"the vision tower is model_type {shown(str(config.get('model_type')))}; "
            f"vtx exports {', '.join(VISION_FAMILIES)} and {INTERNVIT} towers"
        )


def _kind(config: Mapping[str, Any]) -> str:
    """The tower's own model_type, where the whole of text and vision is named as well."""
    kind = str(config.get("model_type"))
    return kind if kind in VISION_FAMILIES else f"{kind}_vision_model"
