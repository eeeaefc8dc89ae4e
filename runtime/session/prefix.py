"""The prefix of a prompt, system text and images, on its way through the decoder: whole, and once tokens have left.

Records here are frozen and replaced as a whole at every step, so that an interrupt leaves the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies.base import Removal
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens, Mask, Patches

Key = tuple[bytes, tuple[str, ...]]
ImageEncoders = tuple[tuple[str, Callable[[], ImageTokens]], ...]
Check = Callable[[], None]  # called before every step of a computation; it may raise, to stop there


def no_check() -> None:
    """Never stop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids [n]; those equal to the image token are replaced by the image tokens of `encoders`, in order.

    An encoder is (key, encode): equal keys mean equal image tokens; `encode` gives them and is called only where they
    are not cached. `skipped`: positions between image tokens, and after them, that have no token.
    """

    ids: Ids
    is_vision: Mask
    encoders: ImageEncoders = ()
    skipped: int = 0

    @property
    def prefix_length(self) -> int:
        """Tokens up to and including the last image token; 0 without an image."""
        return int(np.flatnonzero(self.is_vision)[-1]) + 1 if self.is_vision.any() else 0


@dataclass(frozen=True, slots=True, eq=False)
class SavedKV:
    """K/V of the `dropped` slots of a full stage, after its cache has shrunk to `survivors`."""

    stage: int
    survivors: Ids
    dropped: Ids
    kv: Any


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The prefix with all its image tokens, and how deep into the decoder it has come.

    `boundaries` hold its hidden states after 0, 1, 2, ... stages: the first [size, hidden], the last likewise unless
    the image leaves there, those between if tokens may leave there, else the text's only. `saved_kv` is missing from
    the caches of full stages. `inputs` [size, width] are read by stages in addition to hidden states.
    `positions` [size] are its tokens', `next_position` is the suffix's first; [size, 3] if images have positions of
    three parts.
    """

    key: Key
    is_vision: Mask
    images: tuple[Patches, ...]
    positions: Ids
    next_position: int
    boundaries: tuple[HiddenStates, ...]
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    saved_kv: tuple[SavedKV, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.boundaries) - 1

    @property
    def size(self) -> int:
        return len(self.is_vision)

    def deeper(self, hidden: HiddenStates, *, hold: bool) -> Prefix:
        """With its hidden states after one more stage; `hold` the image tokens' of the boundary before."""
        last = self.boundaries[-1]
        before = last if hold or not self.depth else last[~self.is_vision]
        return replace(self, boundaries=(*self.boundaries[:-1], before, hidden))

    def held(self, boundary: int) -> bool:
        """True if the image tokens' hidden states at a boundary are there, or can still come."""
        return boundary > self.depth or len(self.boundaries[boundary]) == self.size

    def rewound(self, boundary: int) -> Prefix:
        """Back at the last boundary, up to this one, with all hidden states."""
        while not self.held(boundary):
            boundary -= 1
        return replace(self, boundaries=self.boundaries[: boundary + 1])

    def whole(self, boundary: int) -> PrunedPrefix:
        """The prefix at a boundary, before any token has left."""
        present, hidden = np.ones(self.size, bool), self.boundaries[boundary]
        return PrunedPrefix((), present, self.positions, self.next_position, hidden, boundary)


def assign_positions(is_vision: Mask, images: Sequence[ImageTokens]) -> tuple[Ids, int]:
    """Positions [n] of a prefix's tokens, and the next one: an image's tokens keep the gaps between them.

    [n, 3] if images' offsets have three parts, which are equal for text.
    """
    if all(image.offsets is None for image in images):  # there may be text among an image's tokens
        return np.arange(len(is_vision), dtype=np.int64), len(is_vision)
    offsets = [np.arange(len(i)) if i.offsets is None else i.offsets for i in images]
    ends = [*(image.positions for image in images)]
    parts = offsets[0].shape[1:] if offsets else ()
    positions = np.zeros((len(is_vision), *parts), np.int64)
    at, token = 0, 0
    for offset, end in zip(offsets, ends, strict=True):
        text = int(np.argmax(is_vision[token:])) if len(offset) else 0
        positions[token : token + text] = np.arange(at, at + text).reshape(-1, *(1 for _ in parts))
        token, at = token + text, at + text
        positions[token : token + len(offset)] = at + offset
        token, at = token + len(offset), at + end
    return positions, at


@dataclass(frozen=True, slots=True, eq=False)
class PrunedPrefix:
    """The prefix on its way after some image tokens have left.

    `removals`: at which boundary which tokens stayed, and whether they took new positions. `present` [prefix.size] are
    the tokens still there, `positions` theirs, `next_position` that of the suffix's first token. `hidden` states are
    those at the boundary after `depth` stages; they are the text's only if no more were held.
    """

    removals: tuple[tuple[int, bytes, bool], ...]
    present: Mask
    positions: Ids
    next_position: int
    hidden: HiddenStates
    depth: int

    @property
    def size(self) -> int:
        return int(self.present.sum())

    def without(self, removal: Removal, is_vision: Mask) -> PrunedPrefix:
        """The tokens that continue after a removal at this boundary."""
        stays = np.ones(self.size, bool)
        stays[is_vision[self.present]] = removal.kept
        present = self.present.copy()
        present[self.present] = stays
        hidden = self.hidden[stays] if len(self.hidden) == self.size else self.hidden
        assert len(hidden) == stays.sum(), "image tokens continue whose hidden states were not held"
        positions, following = self.positions[stays], self.next_position
        if removal.renumbers:
            positions, following = np.arange(len(hidden), dtype=np.int64), len(hidden)
        removals = (*self.removals, (self.depth, removal.kept.tobytes(), removal.renumbers))
        return PrunedPrefix(removals, present, positions, following, hidden, self.depth)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixSlots:
    """The part of the prefix in a stage's cache, for one question: `present` of its tokens ran there, `slots` are left.

    The suffix's first token is in the slot after these, at `position`.
    """

    present: Mask
    slots: int
    position: int
