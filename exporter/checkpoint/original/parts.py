"""What a family in its authors' layout declares, and what was found of one checkpoint beside its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
IMAGE_TOKEN = "<image>"


@dataclass(frozen=True, slots=True)
class OriginalLayout:
    """Functions of a family's `config.json`.

    `tower` names the checkpoint of the vision tower, `own_tower` says whether a tower among the checkpoint's tensors
    counts. `processor` makes of the tower's image processor, as Hugging Face's files have it, that of the model.
    `template` is the chat template where the user gives none.
    """

    tower: Callable[[Config], str]
    own_tower: Callable[[Config], bool]
    processor: Callable[[Config, Config], Config]
    template: Callable[[Config], str]


@dataclass(frozen=True, slots=True)
class OriginalParts:
    """Of one checkpoint: the image processor's configuration, and the chat template."""

    processor: Config
    template: str
