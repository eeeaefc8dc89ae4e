"""The front of a prompt, system text and images, on its way through the decoder: whole, and once rows have left.

Records here are frozen and replaced as a whole at every step, so that an interrupt leaves the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vtx.runtime.policies.policy import Removal
from vtx.runtime.vision.tokens import Ids, ImageTokens, Mask, Patches, Rows

Key = tuple[bytes, tuple[str, ...]]
ImageEncoders = tuple[tuple[str, Callable[[], ImageTokens]], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids [n]; those equal to the image token stand for the rows of `pictures`, in order.

    A picture is (key, encode): equal keys mean equal rows, and `encode` gives them and is called only where they are
    not cached.
    """

    ids: Ids
    is_vision: Mask
    pictures: ImageEncoders = ()

    @property
    def front(self) -> int:
        """Rows up to and with the last vision row; 0 without an image."""
        return int(np.flatnonzero(self.is_vision)[-1]) + 1 if self.is_vision.any() else 0

    @property
    def key(self) -> Key:
        """By which the front is known again."""
        return self.ids[: self.front].tobytes(), tuple(key for key, _ in self.pictures)


@dataclass(frozen=True, slots=True, eq=False)
class SavedKV:
    """K/V of the `dropped` slots of a full stage, after its cache has shrunk to `survivors`."""

    stage: int
    survivors: Ids
    dropped: Ids
    kv: Any


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The prompt up to the last image, and how deep into the decoder it has come with all its vision rows.

    `boundaries` hold its rows after 0, 1, 2, ... stages: the first and the last [size, hidden], those between so
    where rows may leave there, else the text rows only. `aside` is what is missing from the caches of full stages.
    """

    key: Key
    is_vision: Mask
    images: tuple[Patches, ...]
    boundaries: tuple[Rows, ...]
    aside: tuple[SavedKV, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.boundaries) - 1

    @property
    def size(self) -> int:
        return len(self.is_vision)

    @property
    def text_size(self) -> int:
        return int((~self.is_vision).sum())

    def deeper(self, rows: Rows, *, hold: bool) -> Prefix:
        """With its rows after one more stage; `hold` the vision rows of the boundary before."""
        last = self.boundaries[-1]
        before = last if hold or not self.depth else last[~self.is_vision]
        return replace(self, boundaries=(*self.boundaries[:-1], before, rows))

    def held(self, boundary: int) -> bool:
        """Whether the vision rows at a boundary are there, or can still come."""
        return boundary > self.depth or len(self.boundaries[boundary]) == self.size

    def rewound(self, boundary: int) -> Prefix:
        """Back at the last boundary up to this one where all rows are there."""
        while not self.held(boundary):
            boundary -= 1
        return replace(self, boundaries=self.boundaries[: boundary + 1])

    def line(self, boundary: int) -> PrunedPrefix:
        """The front as it stands at a boundary, before any row has left."""
        positions = np.arange(self.size, dtype=np.int64)
        return PrunedPrefix((), np.ones(self.size, bool), positions, self.size, self.boundaries[boundary], boundary)


@dataclass(frozen=True, slots=True, eq=False)
class PrunedPrefix:
    """The front's rows on their way after some vision rows have left.

    `history`: at which boundary which rows stayed, and whether they took new positions. `present` [front.size] are
    the rows still there, `positions` theirs, `next_position` that of the tail's first row. `rows` stand at the
    boundary after `depth` stages; they are the text rows only where no more were held.
    """

    history: tuple[tuple[int, bytes, bool], ...]
    present: Mask
    positions: Ids
    next_position: int
    rows: Rows
    depth: int

    @property
    def size(self) -> int:
        return int(self.present.sum())

    def left(self, departure: Removal, is_vision: Mask) -> PrunedPrefix:
        """What goes on after a departure at this boundary."""
        stays = np.ones(self.size, bool)
        stays[is_vision[self.present]] = departure.kept
        present = self.present.copy()
        present[self.present] = stays
        rows = self.rows[stays] if len(self.rows) == self.size else self.rows
        assert len(rows) == stays.sum(), "vision rows go on that were not held"
        positions, following = self.positions[stays], self.next_position
        if departure.renumbers:
            positions, following = np.arange(len(rows), dtype=np.int64), len(rows)
        history = (*self.history, (self.depth, departure.kept.tobytes(), departure.renumbers))
        return PrunedPrefix(history, present, positions, following, rows, self.depth)

    def deeper(self, rows: Rows) -> PrunedPrefix:
        return replace(self, rows=rows, depth=self.depth + 1)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixSlots:
    """What a stage's cache holds of the front for one question: `present` rows of it ran there, `slots` are left.

    The tail's first row stands in the slot after these, at `position`.
    """

    present: Mask
    slots: int
    position: int
