"""Standing questions: which are due for a frame, and for which the last answer stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.vision.tokens import HiddenStates
from vtx.tools.watch.config import StandingQuestion

GRID = 64  # cells of a picture a side


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """A picture reduced to the mean colours of its `GRID` x `GRID` cells, [GRID, GRID, 3] int16, and its size."""

    size: tuple[int, int]
    means: NDArray[np.int16]

    @classmethod
    def of(cls, image: Image.Image) -> Cells:
        small = image.resize((GRID, GRID), Image.Resampling.BOX)
        return cls(image.size, np.asarray(small).astype(np.int16))

    def change(self, other: Cells) -> float:
        """The largest difference of a colour in any cell, from 0 to 1; 1 if the sizes differ.

        Cells average noise of the sensor away, and the largest of them shows a small thing in a large picture.
        """
        if self.size != other.size:
            return 1.0
        return float(np.abs(self.means - other.means).max()) / 255


@dataclass(frozen=True, slots=True, eq=False)
class Last:
    """The last answer that was computed, about a frame with this `key` of its preprocessed pixels.

    `embedding` [tokens, hidden] are that frame's image tokens, if later ones are compared with them.
    """

    key: tuple[str, ...]
    cells: Cells | None
    answer: Mapping[str, Any]
    embedding: HiddenStates | None = None

    def moved(self, embedding: HiddenStates) -> float:
        """The largest 1 - cosine of a frame's image token with the one at its place here; infinite if none is."""
        if self.embedding is None or self.embedding.shape != embedding.shape:
            return math.inf
        lengths = np.linalg.norm(self.embedding, axis=-1) * np.linalg.norm(embedding, axis=-1)
        cosines = (self.embedding * embedding).sum(-1) / np.maximum(lengths, np.finfo(np.float32).tiny)
        return float((1 - cosines).max())


class QuestionState:
    """A standing question with what is known of it so far."""

    def __init__(self, question: StandingQuestion) -> None:
        self.question = question
        self.settings = question.settings
        self.last: Last | None = None
        self.reported: str | None = None  # the text of the last event
        self.error = ""  # of the last attempt, if it failed
        self._asked_at = -math.inf
        self._cells: Cells | None = None

    @property
    def due_from(self) -> float:
        """The time of the monotonic clock from which on it may be due."""
        question = self.question
        if question.when is not None:
            return math.inf
        if question.every is not None and question.changed is None:
            return self._asked_at + question.every
        return -math.inf

    def due(self, now: float, cells: Cells | None) -> bool:
        """True if it is to be asked about a frame by its own schedule."""
        question = self.question
        if question.when is not None:
            return False
        if question.every is None and question.changed is None:
            return True
        if question.every is not None and now >= self._asked_at + question.every:
            return True
        return question.changed is not None and self._changed(cells) > question.changed

    def asked(self, now: float, cells: Cells | None) -> None:
        """It is asked about a frame."""
        self._asked_at = now
        self._cells = cells

    def near(self, cells: Cells | None, most: float) -> float | None:
        """The change since the frame of the last answer, if it is at most `most`."""
        if self.last is None or self.last.cells is None or cells is None:
            return None
        change = cells.change(self.last.cells)
        return change if change <= most else None

    def _changed(self, cells: Cells | None) -> float:
        return math.inf if self._cells is None or cells is None else cells.change(self._cells)
