"""The CLIP whose text tower goes into a bundle, for CDPruner in its authors' form: opened and checked as a checkpoint.

Its tensors have canonical names that begin with `clip.`: `clip.text.` for the text encoder, `clip.vision.` for the
vision encoder, of which only the last norm is used, and the two projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vtx.exporter.checkpoint.config import ModelConfig, check_layers, parse
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.loader import Checkpoint, CheckpointKind, open_model
from vtx.exporter.checkpoint.text import read_plain_tokenizer
from vtx.runtime.bundle.safetensors import read_tensor, shown
from vtx.runtime.bundle.spec.model_spec import TextTowerSpec
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError

FILE = "the text tower's config.json"
TOKENIZER = "text_tower_tokenizer.json"
OLD_END = 2  # in configurations without the end token: the highest id is used instead
CLASS_EMBEDDING = "embeddings.class_embedding"
SAME = 1e-2  # largest difference of two towers' class embeddings, relative: one may be rounded to fp16
_PARTS = {"text_model.": "clip.text.", "vision_model.": "clip.vision."}


@dataclass(frozen=True, slots=True)
class TextTowerCheckpoint:
    """A CLIPModel whose text encoder and projections are exported; `tokenizer` is its tokenizer.json."""

    spec: TextTowerSpec
    checkpoint: Checkpoint
    tokenizer: str
    warnings: tuple[str, ...]


def open_text_tower(path: str, model: Checkpoint, config: ModelConfig, *, allow_pickle: bool) -> TextTowerCheckpoint:
    """Open the CLIP in directory `path`, or on the hub, whose vision tower the LLaVA has. Raises CheckpointError."""

    def canonical(name: str) -> str:
        prefix = next((old for old in _PARTS if name.startswith(old)), "")
        return _PARTS.get(prefix, "clip.") + name.removeprefix(prefix)

    read_size = partial(size, file=FILE)
    eps = partial(number, name="layer_norm_eps", file=FILE)
    checkpoint = open_model(path, CheckpointKind(_check_clip, canonical), allow_pickle=allow_pickle)
    clip = parse("CLIPConfig", checkpoint.config, FILE)
    _check_fits(clip, config)
    text = clip.text_config
    end = text.eos_token_id
    vocab = read_size(text, "vocab_size")
    if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < vocab:
        raise CheckpointError(f"{FILE}: eos_token_id is {end!r:.60}, not a token of its vocabulary")
    try:
        spec = TextTowerSpec(
            tokenizer=TOKENIZER,
            layers=read_size(text, "num_hidden_layers"),
            hidden=read_size(text, "hidden_size"),
            intermediate=read_size(text, "intermediate_size"),
            heads=read_size(text, "num_attention_heads"),
            vocab=vocab,
            max_tokens=read_size(text, "max_position_embeddings"),
            width=read_size(clip, "projection_dim"),
            activation=str(text.hidden_act),
            eps=eps(vars(text)),
            vision_eps=eps(vars(clip.vision_config)),
            end_id=None if end == OLD_END else end,
        )
    except BundleError as e:
        raise CheckpointError(f"{FILE}: {e}".replace("vtx.json: ", "")) from e
    tokenizer = read_plain_tokenizer(checkpoint.folder, "clip", spec.vocab)
    return TextTowerCheckpoint(spec, checkpoint, tokenizer, _warnings(path, checkpoint, model))


def _check_clip(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind != "clip":
        hint = ", which lacks the projections" if str(kind).startswith("clip_") else ""
        raise UnsupportedModelError(
            f"the text tower is model_type {shown(str(kind))}{hint}; --text-tower needs the whole CLIPModel whose "
            "vision tower the LLaVA has, e.g. openai/clip-vit-large-patch14-336 for LLaVA-1.5"
        )
    for part in ("text_config", "vision_config"):
        settings = config.get(part)
        if isinstance(settings, Mapping):
            check_layers(settings, f"the text tower's {part}")


def _check_fits(clip: Any, config: ModelConfig) -> None:
    vision = config.vision
    blocks = len(config.feature_layers)
    if vision.family != "clip" or blocks > 1:
        problem = f"CDPruner projects the hidden states of one layer, and this model uses {blocks}"
        problem = problem if vision.family == "clip" else f"a {vision.family} vision tower has no CLIP text tower"
        raise UnsupportedModelError(f"--text-tower: {problem}; leave the option out, and use cdpruner:text=embedding")
    width = getattr(clip.vision_config, "hidden_size", None)
    if width != vision.hidden:
        raise UnsupportedModelError(
            f"--text-tower: its vision tower has hidden size {width!r:.40}, the LLaVA's has {vision.hidden}; name the "
            "CLIP that the LLaVA was made with"
        )


def _warnings(path: str, clip: Checkpoint, model: Checkpoint) -> tuple[str, ...]:
    """A warning if the LLaVA's tower differs from the CLIP's: training changes the features of patches."""
    pair = [c.tensors.get(f"{part}{CLASS_EMBEDDING}") for c, part in ((clip, "clip.vision."), (model, "vision."))]
    if any(info is None for info in pair):
        return (f"{path} holds no vision tower to compare with; it may not belong to this LLaVA",)
    theirs, ours = (read_tensor(info).astype(np.float32) for info in pair if info is not None)
    if theirs.shape == ours.shape and np.abs(theirs - ours).max() <= SAME * np.abs(ours).max():
        return ()
    return (f"the vision tower differs from the one in {path}: relevance by its text tower is approximate",)
