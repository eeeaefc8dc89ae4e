"""Opening a model: its checkpoint, and for an original layout the vision tower that it names.

A checkpoint in an original layout gets the settings of Hugging Face's files, so that no other module knows of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from vtx.exporter.checkpoint.config import VISION_FAMILIES
from vtx.exporter.checkpoint.families.registry import find_family
from vtx.exporter.checkpoint.family import Config, Family, OriginalLayout, OriginalParts
from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.loader import (
    Checkpoint,
    CheckpointKind,
    canonical_name,
    check_model,
    is_plain_path,
    open_model,
)
from vtx.exporter.checkpoint.mixture import stack_experts
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
from vtx.exporter.checkpoint.original.lerobot import policy_settings
from vtx.exporter.checkpoint.processor import ALONE, read_image_processor
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.bundle.safetensors import TensorInfo, shown
from vtx.runtime.bundle.spec.stored import EMBEDDING
from vtx.runtime.bundle.spec.text_settings import MAX_ID
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError

TOWER = "vision."
TABLE = "table.weight"  # an output matrix that a checkpoint may hold in place of the embeddings


def open_checkpoint(
    model: str,
    *,
    tower: str | None = None,
    allow_pickle: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open the checkpoint in directory `model`, else download the hub model of that id; `progress` gets a line a step.

    `tower` is the vision tower of a checkpoint that only names one. With `allow_pickle` files of `torch.save` are read
    if there is no safetensors file. The config is checked before weights are downloaded. Raises CheckpointError,
    UnsupportedModelError, RequestError, DeviceError.
    """

    def folders(config: Config) -> Collection[str]:
        layout = find_family(config).original
        return layout.folders.values() if layout else ()

    kind = CheckpointKind(check_model, canonical_name, folders)
    checkpoint = open_model(model, kind, allow_pickle=allow_pickle, progress=progress)
    family = find_family(checkpoint.config)
    checkpoint = replace(checkpoint, tensors=_arranged(family, checkpoint))
    layout = family.original
    if layout is not None and layout.base is not None:
        return _with_base(checkpoint, layout, layout.base(checkpoint.config), tower)
    if layout is not None and layout.tower is not None:
        return complete(checkpoint, layout, tower, allow_pickle=allow_pickle)
    if tower is not None:
        raise RequestError("--tower is for checkpoints that only name their tower; this one holds it, leave it out")
    if layout is None:
        return checkpoint
    whole_layout = layout.whole
    if whole_layout is None:
        return _in_folders(checkpoint, layout)
    folder = checkpoint.folder
    config = checkpoint.config
    if whole_layout.text is not None:
        config = {**config, "text_config": config.get(whole_layout.text)}
    if whole_layout.image_token is not None:
        config = {**config, "image_token_id": _added_id(folder, whole_layout.image_token)}
    config = {**config, **whole_layout.sizes(config, checkpoint.tensors)}
    end_ids = None if whole_layout.end_token is None else (_added_id(folder, whole_layout.end_token),)
    processor = layout.processor(config, read_settings(folder, ALONE))
    parts = OriginalParts(processor, layout.template(config), folder, end_ids)
    return replace(
        checkpoint, config=config, tensors=dict(whole_layout.tensors(config, checkpoint.tensors)), original=parts
    )


def _arranged(family: Family, checkpoint: Checkpoint) -> Mapping[str, TensorInfo]:
    """The tensors as graphs take them: in the order that the family makes, experts together, matrices turned."""
    tensors = dict(checkpoint.tensors)
    for name in family.transposed:
        if name in tensors:
            tensors[name] = tensors[name].turned
    if TABLE in tensors:
        tensors.setdefault(EMBEDDING, tensors[TABLE])
    stacked = stack_experts(tensors)
    return stacked if family.arrange is None else dict(family.arrange(family.read(checkpoint.config), stacked))


def _in_folders(checkpoint: Checkpoint, layout: OriginalLayout) -> Checkpoint:
    """A checkpoint whose parts are in folders of their own, with the settings of all."""
    folder = checkpoint.folder
    settings = {key: read_settings(folder, f"{part}/config.json") for key, part in layout.folders.items()}
    config = {**checkpoint.config, **settings}
    text, vision = (folder / layout.folders[key] for key in ("llm_cfg", "vision_tower_cfg"))
    processor = layout.processor(config, read_image_processor(vision))
    return replace(checkpoint, config=config, original=OriginalParts(processor, layout.template(config), text))


def _with_base(checkpoint: Checkpoint, layout: OriginalLayout, name: str, given: str | None) -> Checkpoint:
    """A policy of LeRobot with the settings and the tokenizer of the checkpoint it names, or of the one `given`."""
    address = given or _folder_inside(checkpoint, name) or name
    try:
        base = open_model(address, CheckpointKind(lambda _: None, canonical_name), weights=False)
    except CheckpointError as cause:
        raise CheckpointError(
            f"the checkpoint has no tokenizer, it names {shown(name)}, which cannot be opened ({cause}); give the "
            "directory of that model's tokenizer and config.json with --tower PATH"
        ) from cause
    policy = policy_settings(checkpoint.folder, checkpoint.config)
    config = {**checkpoint.config, "base": dict(base.config), "policy": policy}
    parts = OriginalParts(layout.processor(config, {}), layout.template(config), base.folder)
    notes = (*checkpoint.notes, f"the tokenizer is from {base.folder}")
    return replace(checkpoint, config=config, original=parts, notes=notes)


def _added_id(folder: Path, token: str) -> int:
    listed = read_settings(folder, "tokenizer_config.json").get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, Mapping) else ()
    ids = {str(entry["content"]): id for id, entry in entries if isinstance(entry, Mapping) and "content" in entry}
    id = ids.get(token, read_settings(folder, "added_tokens.json").get(token))
    if not str(id).isdecimal() or not 0 <= int(str(id)) <= MAX_ID:
        raise CheckpointError(
            f"neither tokenizer_config.json nor added_tokens.json gives the id of {token}; use the tokenizer that "
            "belongs to the model"
        )
    return int(str(id))


def complete(checkpoint: Checkpoint, layout: OriginalLayout, tower: str | None, *, allow_pickle: bool) -> Checkpoint:
    """The checkpoint with `vision_config` in its configuration, the tower's tensors, and its `original` parts."""
    config = checkpoint.config
    if "vision_config" in config or "text_config" in config:
        raise UnsupportedModelError(
            "config.json mixes the original LLaVA layout with Hugging Face's (vision_config, text_config); "
            "use a checkpoint in one of them"
        )
    assert layout.tower is not None
    tower_tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(TOWER)}
    uses_own = bool(tower_tensors) and layout.own_tower(config)
    name = layout.tower(config)
    pickle = allow_pickle
    vision, processor, opened = find_tower(name, tower, checkpoint, weights=not uses_own, allow_pickle=pickle)
    tensors = dict(checkpoint.tensors)
    notes = checkpoint.notes
    if uses_own:
        notes = (*notes, "the vision tower is the checkpoint's own, which was trained with it")
    else:
        assert opened is not None
        tensors = {name: info for name, info in tensors.items() if name not in tower_tensors}
        tensors |= {name: info for name, info in opened.tensors.items() if name.startswith(TOWER)}
        notes = (*notes, f"the vision tower is from {opened.folder}", *opened.notes)
    parts = OriginalParts(layout.processor(config, processor), layout.template(config), checkpoint.folder)
    config = {**config, "vision_config": dict(vision)}
    return replace(checkpoint, config=config, tensors=tensors, notes=notes, original=parts)


def _folder_inside(model: Checkpoint, name: str) -> str | None:
    """The folder of a checkpoint that holds the tower it names, or None."""
    files = checkpoint_files(model.folder)
    for part in (name, PurePosixPath(name).name):
        if part and is_plain_path(part) and files.exists(f"{part}/config.json"):
            return str(model.folder / part)
    return None


def find_tower(
    name: str, given: str | None, model: Checkpoint, *, weights: bool, allow_pickle: bool
) -> tuple[Config, Config, Checkpoint | None]:
    """The tower called `name` by the checkpoint `model`, or the one `given` by the user.

    It is a `vision_config`, an image processor's configuration, and the tower's checkpoint if one was opened. Without
    `weights` the model holds those itself. Raises CheckpointError, UnsupportedModelError.
    """
    if given is None and not weights and name == CLIP_L_336:
        return CLIP_L_336_CONFIG, CLIP_L_336_PROCESSOR, None
    # it may name a folder inside it or a hub id; other folders are for the user to name
    address = _folder_inside(model, name) if given is None else given
    try:
        if address is None and (not is_plain_path(name) or name.count("/") != 1):
            raise CheckpointError("it is a path of the machine that it was trained on")  # noqa: TRY301
        kind = CheckpointKind(_check_tower, _tower_name)
        tower = open_model(address or name, kind, weights=weights, allow_pickle=allow_pickle)
    except UnsupportedModelError:
        raise
    except CheckpointError as cause:
        if address is not None:
            raise CheckpointError(f"the vision tower: {cause}") from cause
        raise CheckpointError(
            f"the checkpoint has no vision tower, it names {shown(name)}, which is not in its folder "
            f"({cause}); give the tower's directory with --tower PATH"
        ) from cause
    if tower.config.get("model_type") == INTERNVIT:
        tower = replace(tower, tensors=dict(thirds(tower.tensors)))
        return internvit_config(tower.config, name), internvit_processor(name), tower
    config = {**tower.config.get("vision_config", tower.config), "model_type": _kind(tower.config)}
    return config, read_image_processor(tower.folder), tower


def _tower_name(name: str) -> str:
    names_of = (re.sub(pattern, part, name) for pattern, part in INTERNVIT_TENSORS if re.search(pattern, name))
    return next(names_of, None) or canonical_name(name)


def _check_tower(config: Config) -> None:
    if _kind(config) not in VISION_FAMILIES and config.get("model_type") != INTERNVIT:
        raise UnsupportedModelError(
            f"the vision tower is model_type {shown(str(config.get('model_type')))}; "
            f"vtx exports {', '.join(VISION_FAMILIES)} and {INTERNVIT} towers"
        )


def _kind(config: Config) -> str:
    """The tower's model_type, also if `config` is of a whole model of text and vision."""
    kind = str(config.get("model_type"))
    return kind if kind in VISION_FAMILIES else f"{kind}_vision_model"
