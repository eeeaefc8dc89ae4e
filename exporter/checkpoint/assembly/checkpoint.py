"""Opening a model: its checkpoint, and for a layout of its authors' the tower that it names.

Such a checkpoint is completed by what Hugging Face's files would say, so that nothing else knows of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.assembly.towers import find_tower
from vtx.exporter.checkpoint.families.registry import find_family
from vtx.exporter.checkpoint.loader import Checkpoint, canonical_name, check_model, open_model, read_settings
from vtx.exporter.checkpoint.original.parts import OriginalLayout, OriginalParts, WholeLayout
from vtx.exporter.checkpoint.processor import read_image_processor
from vtx.runtime.bundle.spec.text_settings import MAX_ID
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError

TOWER = "vision."


def open_checkpoint(
    model: str,
    *,
    tower: str | None = None,
    allow_pickle: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open the checkpoint in directory `model`, else download the hub model of that id; `progress` gets a line a step.

    `tower` is the vision tower of a checkpoint that only names one. With `allow_pickle` the tensors in files of
    `torch.save` count, where there are none in safetensors. The config is judged before weights are downloaded.

    Raises:
        CheckpointError: what is damaged, hostile, incomplete or out of reach.
        UnsupportedModelError: another model.
        RequestError: a `tower` for a checkpoint that has its own.
        DeviceError: huggingface_hub is not installed.

    """
    found = open_model(model, check_model, canonical_name, parts=_folders, allow_pickle=allow_pickle, progress=progress)
    layout = find_family(found.config).original
    if layout is not None and layout.tower is not None:
        return complete(found, layout, tower, allow_pickle=allow_pickle)
    if tower is not None:
        raise RequestError("--tower is for checkpoints that only name their tower; this one holds it, leave it out")
    if layout is None:
        return found
    return _joined(found, layout) if layout.whole is None else _whole(found, layout, layout.whole)


def _folders(config: Mapping[str, Any]) -> Collection[str]:
    layout = find_family(config).original
    return layout.folders.values() if layout else ()


def _joined(checkpoint: Checkpoint, layout: OriginalLayout) -> Checkpoint:
    """A checkpoint in several folders, with their configurations and the tower's image processor. CheckpointError."""
    folder = checkpoint.folder
    own = {key: read_settings(folder, f"{part}/config.json") for key, part in layout.folders.items()}
    text, tower = (folder / layout.folders[key] for key in ("llm_cfg", "vision_tower_cfg"))
    processor, config = read_image_processor(tower), {**checkpoint.config, **own}
    parts = OriginalParts(layout.processor(config, processor), layout.template(config), text)
    return replace(checkpoint, config=config, original=parts)


def _whole(checkpoint: Checkpoint, layout: OriginalLayout, whole: WholeLayout) -> Checkpoint:
    """A checkpoint whose parts all are there, with its tensors apart and the ids that its tokenizer's files have."""
    text = checkpoint.config.get(whole.text)
    ids = {token: _added_id(checkpoint.folder, token) for token in (whole.image_token, whole.end_token)}
    config = {**checkpoint.config, "text_config": text, "image_token_id": ids[whole.image_token]}
    parts = OriginalParts(
        layout.processor(config, {}), layout.template(config), checkpoint.folder, (ids[whole.end_token],)
    )
    return replace(checkpoint, config=config, tensors=dict(whole.tensors(config, checkpoint.tensors)), original=parts)


def _added_id(folder: Path, token: str) -> int:
    """The id of an added token, as the files beside a tokenizer say it. Raises CheckpointError."""
    listed = read_settings(folder, "tokenizer_config.json").get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, Mapping) else ()
    known = {str(entry["content"]): id for id, entry in entries if isinstance(entry, Mapping) and "content" in entry}
    id = known.get(token, read_settings(folder, "added_tokens.json").get(token))
    if not str(id).isdecimal() or not 0 <= int(str(id)) <= MAX_ID:
        raise CheckpointError(
            f"neither tokenizer_config.json nor added_tokens.json says the id of {token}; take the tokenizer that "
            "belongs to the model"
        )
    return int(str(id))


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
    assert layout.tower is not None
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
        original=OriginalParts(layout.processor(config, found.processor), layout.template(config), checkpoint.folder),
    )
