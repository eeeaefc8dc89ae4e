"""CDPruner: only image tokens that are relevant to the question and unlike each other enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Entry, PromptText, Reduction
from vtx.runtime.policies.count import check_keep, number_to_keep
from vtx.runtime.policies.registry import reduction
from vtx.runtime.vision.tokens import Ids, ImageTokens

Floats = NDArray[np.float32]
COSINES, LENGTHS = "cosines", "lengths"  # of an image's tokens: they serve every question
OFFSET = np.float32(1e-6)  # of the least relevant token, as in the released code


@reduction("cdpruner")
@dataclass(frozen=True, slots=True)
class CDPruner(Reduction, Entry):
    """Of each image `keep` tokens enter: those that a determinantal point process picks greedily (CDPruner, MAP).

    Its kernel is r_i * cos(x_i, x_j) * r_j over the projector's output x. The relevance r is the cosine of x with the
    mean input embedding of the text after the images, scaled to 0..1: the form for models without a text tower of their
    own (text=embedding). text=none leaves relevance out, so that every question shares one choice. `keep` is a share up
    to 1, rounded up, or a number of tokens. Tokens enter in the order they have, at positions without gaps.
    """

    keep: float = 0.25
    text: Literal["embedding", "none", "clip"] = "embedding"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"keep": 192.0},
        "128": {"keep": 128.0},
        "64": {"keep": 64.0},
    }

    def __post_init__(self) -> None:
        check_keep("cdpruner", self.keep)
        if self.text == "clip":
            raise RequestError(
                "cdpruner: text=clip needs the text tower of the CLIP model whose vision tower this is, and bundles do "
                "not hold one; use text=embedding, the form for models without it, or text=none"
            )

    @property
    def uses_question(self) -> bool:
        return self.text == "embedding"

    def entry(self) -> Entry | None:
        return self

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        count = number_to_keep(self.keep, len(image.rows))
        if count >= len(image.rows):
            return None
        if COSINES not in image.derived:
            image.derived[COSINES] = cosines_of(image.rows)
            image.derived[LENGTHS] = _lengths(image.rows)
        cosines = image.derived[COSINES]
        if not self.uses_question:
            return greedy(cosines, count)
        assert question is not None
        mean: Floats = question.hidden[question.after].mean(0)
        relevance = scaled(image.rows @ mean / (image.derived[LENGTHS] * _lengths(mean)))
        return greedy(relevance[:, None] * cosines * relevance[None], count)


def cosines_of(rows: Floats) -> Floats:
    """Cosines [n, n] of rows [n, width]; that of a row with itself is 1, or rounding would choose the first pick."""
    unit = rows / _lengths(rows)[:, None]
    cosines: Floats = unit @ unit.T
    np.fill_diagonal(cosines, 1)
    return cosines


def scaled(relevance: Floats) -> Floats:
    """Relevance from almost 0 to a little over 1, as the released code scales it; all 1 where all are equal."""
    least, span = relevance.min(), relevance.max() - relevance.min()
    return (relevance - least + OFFSET) / span if span > 0 else np.ones_like(relevance)


def greedy(kernel: Floats, count: int) -> Ids:
    """Indices, rising, of `count` rows of `kernel` [n, n] that greedily maximise the determinant of its submatrix.

    Of equal gains the earlier row is taken. Where no row gains any more, the earliest of the rest are.
    """
    gain = kernel.diagonal().copy()
    taken = np.zeros(len(kernel), bool)
    factors = np.zeros((count, len(kernel)), np.float32)
    for step in range(count):
        best = int(np.argmax(np.where(taken, -np.inf, gain)))
        if gain[best] <= 0:
            taken[np.flatnonzero(~taken)[: count - step]] = True
            break
        factor = (kernel[best] - factors[:step, best] @ factors[:step]) / np.sqrt(gain[best])
        factors[step] = factor
        gain -= factor * factor
        taken[best] = True
    return np.flatnonzero(taken)


def _lengths(rows: Floats) -> Floats:
    lengths: Floats = np.maximum(np.linalg.norm(rows, axis=-1), np.float32(1e-30))
    return lengths
