"""CLIP's text tower as a bundle declares it: what CDPruner measures an image's relevance to a question with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS, MAX_SIZE
from vtx.runtime.errors import BundleError

MAX_SEGMENT = 1 << 12  # ids; CLIP has 77


@dataclass(frozen=True, slots=True)
class TextTowerSpec:
    """A text encoder that turns up to `max_tokens` ids into a vector of `width`, in one space with the patches.

    `tokenizer` is its own tokenizer's file. A segment of ids counts up to its first `end_id`, or up to its highest id
    where that is None, as in CLIPs whose configuration says eos_token_id 2. `vision_eps` is that of the norm before
    the projection of patches.
    """

    tokenizer: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    max_tokens: int
    width: int
    activation: str
    eps: float
    vision_eps: float
    end_id: int | None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "end_id" else 1
            if isinstance(value, int) and not least <= value <= MAX_SIZE:
                raise BundleError(f"vtx.json: text_tower.{field.name} is outside {least}..{MAX_SIZE}; export again")
            if isinstance(value, float) and not 0 < value < math.inf:
                raise BundleError(f"vtx.json: text_tower.{field.name} is {value}, not a positive number; export again")
        if self.max_tokens > MAX_SEGMENT or self.layers > MAX_LAYERS or self.hidden % self.heads:
            raise BundleError(
                f"vtx.json: a text tower of {self.layers} layers, {self.hidden} wide with {self.heads} heads, for "
                f"{self.max_tokens} tokens is not one; export again"
            )
