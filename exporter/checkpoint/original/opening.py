"""A checkpoint in its authors' layout, completed by its vision tower and by what Hugging Face's files would say."""

from __future__ import annotations

from dataclasses import replace

from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.original.parts import OriginalLayout, OriginalParts
from vtx.exporter.checkpoint.original.towers import find_tower
from vtx.runtime.errors import UnsupportedModelError

TOWER = "vision."


def complete(checkpoint: Checkpoint, layout: OriginalLayout, tower: str | None, *, allow_pickle: bool) -> Checkpoint:
    """The checkpoint with `vision_config` in its configuration, the tower's tensors, and its `original` parts.

    Raises:
        CheckpointError: the tower is missing, damaged or hostile.
        UnsupportedModelError: a tower that vtx does not export.

    """
    config = checkpoint.config
    if "vision_config" in config or "text_config" in config:
        raise UnsupportedModelError(
            "config.json mixes the original LLaVA layout with Hugging Face's (vision_config, text_config); "
            "take a checkpoint in one of them"
        )
    own = {name: info for name, info in checkpoint.tensors.items() if name.startswith(TOWER)}
    keeps = bool(own) and layout.own_tower(config)
    found = find_tower(layout.tower(config), tower, checkpoint, weights=not keeps, allow_pickle=allow_pickle)
    tensors, origin = dict(checkpoint.tensors), found.origin
    if keeps:
        origin = "the checkpoint itself, where it was trained on"
    else:
        assert found.checkpoint is not None
        tensors = {name: info for name, info in tensors.items() if name not in own}
        tensors |= {name: info for name, info in found.checkpoint.tensors.items() if name.startswith(TOWER)}
    notes = *checkpoint.notes, f"the vision tower is that of {origin}"
    return replace(
        checkpoint,
        config={**config, "vision_config": dict(found.config)},
        tensors=tensors,
        notes=(*notes, *(found.checkpoint.notes if found.checkpoint and not keeps else ())),
        original=OriginalParts(layout.processor(config, found.processor), layout.template(config)),
    )
