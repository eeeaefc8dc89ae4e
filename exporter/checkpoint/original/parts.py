"""What a family in its authors' layout declares, and what was found of one checkpoint beside its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.safetensors import TensorInfo

Config = Mapping[str, Any]
IMAGE_TOKEN = "<image>"


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """What a checkpoint with all of its parts says in files of its own.

    `text` is the key of the decoder's configuration; `image_token` stands for an image and `end_token` ends an answer:
    their ids are the tokenizer's. `tensors` takes apart those that hold several weights of a `config.json`.
    """

    text: str
    image_token: str
    end_token: str
    tensors: Callable[[Config, Mapping[str, TensorInfo]], Iterable[tuple[str, TensorInfo]]]


@dataclass(frozen=True, slots=True)
class OriginalLayout:
    """Functions of a family's `config.json`.

    `processor` makes of the tower's image processor, as Hugging Face's files have it, that of the model. `template` is
    the chat template where the user gives none. `tower` names the checkpoint of a vision tower elsewhere, `own_tower`
    says whether one among the checkpoint's tensors counts. `folders` are those of a checkpoint in several parts, by the
    key of `config.json` under which a part's configuration stands. `whole` is of a checkpoint with all of its parts.
    """

    processor: Callable[[Config, Config], Config]
    template: Callable[[Config], str]
    tower: Callable[[Config], str] | None = None
    own_tower: Callable[[Config], bool] = lambda _: False
    folders: Mapping[str, str] = field(default_factory=dict)
    whole: WholeLayout | None = None


@dataclass(frozen=True, slots=True)
class OriginalParts:
    """Of one checkpoint: the image processor's configuration, the chat template, and where the tokenizer is.

    `end_ids` end an answer, whatever other files say.
    """

    processor: Config
    template: str
    text_folder: Path
    end_ids: tuple[int, ...] | None = None
