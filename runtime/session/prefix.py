"""The prefix of a prompt, system text and images, on its way through the decoder, also once tokens have left.

Records here are frozen and replaced as a whole at every step, so that an interrupt leaves the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec import names
from vtx.runtime.policies.base import Removal
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens, Mask, Patches

Key = tuple[bytes, tuple[str, ...]]
ImageEncoders = tuple[tuple[str, Callable[[], ImageTokens]], ...]
Check = Callable[[], object]  # called before every step of a computation; it may raise, to stop there


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


def prefix_key(prompt: Prompt, question: Ids | None) -> Key:
    """Equal for prompts with the same K and V of their prefix; `question` is what it sees of the text behind it."""
    behind = () if question is None else (question.tobytes().hex(),)
    return prompt.ids[: prompt.prefix_length].tobytes(), (*(key for key, _ in prompt.encoders), *behind)


@dataclass(frozen=True, slots=True, eq=False)
class SavedKV:
    """K/V of the `dropped` slots of a full stage, after its cache has shrunk to `survivors`."""

    stage: int
    survivors: Ids
    dropped: Ids
    kv: Any


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The prefix, or what removals of image tokens left of it, and how deep into the decoder it has come.

    `is_vision` is a mask of all its tokens, and `present` of those that are left; `positions` [size] are theirs,
    [size, 3] if images have positions of three parts, `next_position` is the suffix's first. `boundaries` hold their
    hidden states after `first`, `first + 1`, ... stages: the first [size, hidden], the last likewise unless the image
    leaves there, those between if tokens may leave there, else the text's only; after a removal the last alone.
    `inputs` [size, width] are read by stages in addition. `saved_kv` is missing from the caches of full stages.
    `removals`: at which boundary which image tokens stayed, and whether all took new positions.

    The first `common` tokens are those of an earlier prefix: their K and V are in the caches of the next
    `len(begun)` stages after `first`, and `begun` has the hidden states of the text tokens among them after each. Of
    them, boundaries after these stages hold the text's only.
    """

    key: Key
    is_vision: Mask
    images: tuple[Patches, ...]
    positions: Ids
    next_position: int
    boundaries: tuple[HiddenStates, ...]
    present: Mask
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    saved_kv: tuple[SavedKV, ...] = ()
    removals: tuple[tuple[int, bytes, bool], ...] = ()
    first: int = 0
    common: int = 0
    begun: tuple[HiddenStates, ...] = ()

    @property
    def depth(self) -> int:
        return self.first + len(self.boundaries) - 1

    @property
    def size(self) -> int:
        return len(self.positions)

    @property
    def start(self) -> int:
        """The number of leading tokens that the next stage need not run."""
        return self.common if len(self.boundaries) <= len(self.begun) else 0

    def deeper(self, hidden: HiddenStates, *, hold: bool) -> Prefix:
        """With its tokens' hidden states after one more stage, those from `start` on; `hold` the image's before it."""
        if self.start:
            hidden = np.concatenate([self.begun[len(self.boundaries) - 1], hidden])
        if self.removals:
            return replace(self, boundaries=(hidden,), first=self.first + 1, begun=self.begun[1:])
        last = self.boundaries[-1]
        before = last if hold or not self.depth else last[~self.is_vision[self._tokens_of(last)]]
        return replace(self, boundaries=(*self.boundaries[:-1], before, hidden))

    def _tokens_of(self, hidden: HiddenStates) -> Mask:
        """A mask of the tokens whose hidden states a boundary holds: all, all but the `common` image's, or the text."""
        is_text = ~self.is_vision[self.present]
        for mask in (np.ones(self.size, bool), is_text | (np.arange(self.size) >= self.common)):
            if len(hidden) == mask.sum():
                return mask
        return is_text

    def text_states(self, count: int) -> tuple[HiddenStates, ...]:
        """The hidden states of the text among the first `count` tokens after each stage so far."""
        text = ~self.is_vision
        states = [hidden[text[self._tokens_of(hidden)]] for hidden in self.boundaries[1:]]
        return tuple(hidden[: int(text[:count].sum())] for hidden in states)

    def agreement(self, other: Prefix) -> int:
        """The number of leading tokens with which another prefix begins, too, before the decoder."""
        count = min(self.size, other.size)
        if not count or self.positions.shape[1:] != other.positions.shape[1:]:
            return 0
        same = self.is_vision[:count] == other.is_vision[:count]
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
            (values, other.inputs[name]) for name, values in self.inputs.items()
        ]
        for mine, theirs in [*pairs, (self.positions, other.positions), (self.boundaries[0], other.boundaries[0])]:
            same &= (mine[:count] == theirs[:count]).reshape(count, -1).all(1)
        return count if same.all() else int(np.argmin(same))

    def after(self, other: Prefix) -> Prefix:
        """Begin where caches hold another prefix: what both have in common is not run again."""
        count = 0 if other.saved_kv else self.agreement(other)
        groups = self.inputs.get(names.GROUP)
        if groups is not None and count < self.size and groups[count, 0] >= 0:  # none is cut in two
            count = min(count, int(np.argmax(groups[:, 0] == groups[count, 0])))
        if not count or not other.depth:
            return self
        return replace(self, common=count, begun=other.text_states(count))

    def after_removal(self, other: Prefix, common: int, stages: int) -> Prefix:
        """As `after`, for what is left of both, if that is text and `other` has run; before, `common` tokens agreed."""
        mine = self.removals
        theirs = other.removals
        same = len(mine) == len(theirs) == 1 and (mine[0][0], mine[0][2]) == (theirs[0][0], theirs[0][2])
        images = any((prefix.present & prefix.is_vision).any() for prefix in (self, other))
        count = int(self.present[:common].sum())
        if not same or images or other.depth < stages or not count:
            return self
        if not np.array_equal(self.positions[:count], other.positions[:count]):
            return self
        return replace(self, common=count, begun=(other.boundaries[0][:0],) * (stages - self.first))

    def whole_from(self, token: int) -> Prefix:
        """With hidden states to come of all tokens from this one on, not only of those after the `common` ones."""
        count = min(self.common, token)
        return replace(self, common=count, begun=tuple(hidden[:count] for hidden in self.begun) if count else ())

    def held(self, boundary: int) -> bool:
        """True if the image tokens' hidden states at a boundary are there, or can still come."""
        return boundary > self.depth or len(self.boundaries[boundary]) == self.size

    def without(self, removal: Removal, boundary: int) -> Prefix:
        """The tokens that continue after a removal at a boundary."""
        stays = np.ones(self.size, bool)
        stays[self.is_vision[self.present]] = removal.kept
        present = self.present.copy()
        present[self.present] = stays
        hidden = self.boundaries[boundary - self.first]
        hidden = hidden[stays[self._tokens_of(hidden)]]
        assert len(hidden) == stays.sum(), "image tokens continue whose hidden states were not held"
        positions = self.positions[stays]
        following = self.next_position
        if removal.renumbers:
            positions = np.arange(len(hidden), dtype=np.int64)
            following = len(hidden)
        return replace(
            self,
            positions=positions,
            next_position=following,
            boundaries=(hidden,),
            present=present,
            first=boundary,
            inputs={name: values[stays] for name, values in self.inputs.items()},
            removals=(*self.removals, (boundary, removal.kept.tobytes(), removal.renumbers)),
            common=0,
            begun=(),
        )


def assign_positions(is_vision: Mask, images: Sequence[ImageTokens]) -> tuple[Ids, int]:
    """Positions [n] of a prefix's tokens, and the next one: an image's tokens keep the gaps between them.

    [n, 3] if images' offsets have three parts, which are equal for text.
    """
    if all(image.offsets is None for image in images):  # there may be text among an image's tokens
        return np.arange(len(is_vision), dtype=np.int64), len(is_vision)
    offsets = [np.arange(len(i)) if i.offsets is None else i.offsets for i in images]
    parts = offsets[0].shape[1:] if offsets else ()
    positions = np.zeros((len(is_vision), *parts), np.int64)
    at = 0
    token = 0
    for image, offset in zip(images, offsets, strict=True):
        first = 0
        end = len(image) if image.span is None else image.span
        for run in [count for count in image.runs if count] or [len(offset)]:
            text = int(np.argmax(is_vision[token:])) if run else 0
            positions[token : token + text] = np.arange(at, at + text).reshape(-1, *(1 for _ in parts))
            token = token + text
            at = at + text
            positions[token : token + run] = at + offset[first : first + run]
            token = token + run
            at = at + end
            first = first + run
    return positions, at


@dataclass(frozen=True, slots=True, eq=False)
class PrefixSlots:
    """The part of the prefix in a stage's cache, for one question: `present` of its tokens ran there, `slots` are left.

    The suffix's first token is in the slot after these, at `position`.
    """

    present: Mask
    slots: int
    position: int
