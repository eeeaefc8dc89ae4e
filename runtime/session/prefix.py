"""The prefix of a prompt, system text and images, and the tokens of it that each stage runs.

Records here are frozen and replaced as a whole at every step, so that an interrupt leaves the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import StageCache
from vtx.runtime.bundle.spec import names
from vtx.runtime.policies.base import Removal
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens, Mask, Patches

ImageEncoders = tuple[tuple[str, Callable[[], ImageTokens]], ...]
Check = Callable[[], object]  # called before every step of a computation; it may raise, to stop there


def no_check() -> None:
    """Never stop."""


class Key(NamedTuple):
    """Equal for prompts of equal prefixes: its ids, its images' keys, and the ids behind it if its tokens see them."""

    ids: bytes = b""
    images: tuple[str, ...] = ()
    question: bytes = b""


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

    def prefix_key(self, question: Ids | None) -> Key:
        """The key of its prefix; `question` is what its tokens see of the text behind it."""
        images = tuple(key for key, _ in self.encoders)
        return Key(self.ids[: self.prefix_length].tobytes(), images, b"" if question is None else question.tobytes())


@dataclass(frozen=True, eq=False)
class Prefix:
    """The tokens [n] of a prompt up to its last image, before the decoder: what its K and V are computed from.

    `hidden` [n, hidden] and `inputs` [n, width] go into the stages; `positions` [n] are the tokens', [n, 3] if images
    have positions of three parts, and `next_position` is the suffix's first. `agreements`: with other prefixes, each
    of which is compared once.
    """

    key: Key
    is_vision: Mask
    images: tuple[Patches, ...]
    positions: Ids
    next_position: int
    hidden: HiddenStates
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    agreements: WeakKeyDictionary[Prefix, int] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    @classmethod
    def empty(cls, key: Key, width: int) -> Prefix:
        none = np.zeros(0, bool)
        return cls(key, none, (), np.zeros(0, np.int64), 0, np.zeros((0, width), np.float32))

    def __len__(self) -> int:
        return len(self.is_vision)

    def agreement(self, other: Prefix) -> int:
        """The number of leading tokens that are equal, so that all which follows from them is equal, too."""
        if self is other:
            return len(self)
        if other not in self.agreements:
            self.agreements[other] = self._compared(other)
        return self.agreements[other]

    def _compared(self, other: Prefix) -> int:
        count = min(len(self), len(other))
        if not count:
            return 0
        if self.key.question != other.key.question or self.positions.shape[1:] != other.positions.shape[1:]:
            return 0
        same = self.is_vision[:count] == other.is_vision[:count]
        pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
            (values, other.inputs[name]) for name, values in self.inputs.items()
        ]
        for mine, theirs in [*pairs, (self.positions, other.positions), (self.hidden, other.hidden)]:
            same &= (mine[:count] == theirs[:count]).reshape(count, -1).all(1)
        return first_false(same)

    def difference(self, former: Prefix) -> str | None:
        """The reason why not all of its tokens are those of a former one, in one word; None: all are."""
        count = self.agreement(former)
        if count == len(self):
            return None
        if not len(former):
            return "first"
        if self.key.question != former.key.question:
            return "question"
        return "image" if self.is_vision[count] else "text"

    def begin_of_group(self, token: int) -> int:
        """The first token of the group that this one continues, since those of a group see each other; or this one."""
        groups = self.inputs.get(names.GROUP)
        if groups is None or token >= len(self) or groups[token, 0] < 0:
            return token
        return min(token, int(np.argmax(groups[:, 0] == groups[token, 0])))


@dataclass(frozen=True, slots=True, eq=False)
class Remaining:
    """The tokens of a prefix that run in a stage: those that are `present` [all of them], at `positions` [present].

    `next_position` is the suffix's first. `removals`: the stages before which tokens left, and whether those that
    stayed took new positions.
    """

    prefix: Prefix
    present: Mask
    positions: Ids
    next_position: int
    removals: tuple[tuple[int, bool], ...] = ()

    @classmethod
    def of(cls, prefix: Prefix) -> Remaining:
        return cls(prefix, np.ones(len(prefix), bool), prefix.positions, prefix.next_position)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_vision(self) -> Mask:
        """A mask of the tokens that are present."""
        return self.prefix.is_vision[self.present]

    @property
    def serves_all(self) -> bool:
        """True if these are the same tokens whatever is asked: no image token has left, or all at once."""
        return not self.removals or (len(self.removals) == 1 and not self.is_vision.any())

    def inputs_from(self, start: int) -> dict[str, NDArray[np.float32]]:
        """The inputs of its tokens from number `start` on."""
        indices = np.flatnonzero(self.present)[start:]
        return {name: values[indices] for name, values in self.prefix.inputs.items()}

    def agreement(self, other: Remaining) -> int:
        """The number of leading tokens whose K and V in a stage are those of `other`'s: all before them is equal.

        None if a question chose them: with another one they run in that one's pass, as in a fresh conversation.
        """
        if self is other:
            return len(self)
        if self.removals != other.removals or not (self.serves_all and other.serves_all):
            return 0
        count = self.prefix.agreement(other.prefix)
        if count < max(len(self.prefix), len(other.prefix)):
            count = min(part.prefix.begin_of_group(count) for part in (self, other))
        return int(self.present[:count].sum())

    def begin_of_group(self, token: int) -> int:
        """As of `Prefix`, by the number among those present."""
        indices = np.flatnonzero(self.present)
        if token >= len(indices):
            return token
        return int(self.present[: self.prefix.begin_of_group(int(indices[token]))].sum())

    def without(self, removal: Removal, number: int) -> Remaining:
        """The tokens that continue after a removal before stage `number`."""
        stays = np.ones(len(self), bool)
        stays[self.is_vision] = removal.kept
        present = self.present.copy()
        present[self.present] = stays
        positions = self.positions[stays]
        following = self.next_position
        if removal.renumbers:
            following = len(positions)
            positions = np.arange(following, dtype=np.int64)
        removals = (*self.removals, (number, removal.renumbers))
        return Remaining(self.prefix, present, positions, following, removals)


@dataclass(frozen=True, slots=True, eq=False)
class SavedKV:
    """K/V of the `dropped` slots of a stage, after its cache has shrunk to `survivors`."""

    survivors: Ids
    dropped: Ids
    kv: Any


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A stage's cache and its content: the K and V of the first of `tokens`, one for each value of `known`.

    `states` are their hidden states after the stage, of those that are `known`. `saved` is missing from the cache.
    """

    cache: StageCache
    tokens: Remaining
    known: Mask
    states: HiddenStates
    saved: SavedKV | None = None

    @property
    def length(self) -> int:
        """The number of tokens whose K and V it holds."""
        return len(self.known)

    def holds(self, tokens: Remaining) -> bool:
        """True if all of these tokens are those that it holds."""
        return self.tokens is tokens and self.length == len(tokens)

    def beginning(self, tokens: Remaining, length: int) -> Segment:
        """As far as it holds other tokens, which agree in the first `length`."""
        known = self.known[:length]
        return Segment(self.cache, tokens, known, self.states[: int(known.sum())])

    def then(self, hidden: HiddenStates, known: Mask) -> Segment:
        """With further tokens, and the hidden states of those `known` of them."""
        if len(self.states):
            hidden = np.concatenate([self.states, hidden])
        return replace(self, known=np.concatenate([self.known, known]), states=hidden)

    def text_only(self) -> Segment:
        """Without the hidden states of image tokens."""
        text = self.known & ~self.tokens.is_vision[: self.length]
        return replace(self, known=text, states=self.states[text[self.known]])

    def states_of(self, indices: Ids) -> HiddenStates:
        """The hidden states of some tokens, rising, which must be known."""
        assert self.known[indices].all(), "image tokens continue whose hidden states were not kept"
        places = np.cumsum(self.known)[indices] - 1
        if len(places) and places[-1] - places[0] + 1 == len(places):
            return self.states[int(places[0]) : int(places[-1]) + 1]
        states: HiddenStates = self.states[places]
        return states


def first_false(mask: Mask) -> int:
    """The index of the first False, or the number of values."""
    return len(mask) if mask.all() else int(np.argmin(mask))


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
    """The `slots` of a stage that a prefix takes. The suffix follows in the next one, at `position`."""

    slots: int
    position: int
