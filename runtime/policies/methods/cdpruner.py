"""CDPruner: only image tokens that are relevant to the question and unlike each other enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.names import CLIP_PATCHES
from vtx.runtime.policies.base import Entry, Needs, PromptText, Reduction
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

    Its kernel is r_i * cos(x_i, x_j) * r_j over the projector's output x. The relevance r, scaled to 0..1, is the
    cosine of x with the mean input embedding of the text after the images: the form for models without a text tower
    (text=embedding). With text=tower it is the authors' form for LLaVA: the cosine of patch and question in CLIP's
    space, its sign turned; of a text in several segments the mean. Presets set it. text=none leaves relevance out, so
    that every question shares one choice. `keep` is a share up to 1, rounded up, or a number of tokens. Tokens enter in
    the order they have, at positions without gaps.
    """

    keep: float = 0.25
    text: Literal["embedding", "none", "tower"] = "embedding"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"keep": 192.0, "text": "tower"},
        "128": {"keep": 128.0, "text": "tower"},
        "64": {"keep": 64.0, "text": "tower"},
    }

    def __post_init__(self) -> None:
        check_keep("cdpruner", self.keep)

    def needs(self) -> Needs:
        return Needs(text_tower=self.text == "tower")

    @property
    def uses_question(self) -> bool:
        return self.text != "none"

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, number_to_keep(self.keep, count))

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        count = self.number_kept(len(image.rows), 1)
        if count >= len(image.rows):
            return None
        if COSINES not in image.derived:
            image.derived[LENGTHS] = _lengths(image.rows)
            image.derived[COSINES] = cosines_of(image.rows)  # last: conversations may share the image
        cosines = image.derived[COSINES]
        if not self.uses_question:
            return greedy(cosines, count)
        assert question is not None
        relevance = scaled(self._relevance(image, question))
        return greedy(relevance[:, None] * cosines * relevance[None], count)

    def _relevance(self, image: ImageTokens, question: PromptText) -> Floats:
        if self.text == "tower":
            assert question.embeddings is not None
            patches = image.patches.signals[CLIP_PATCHES]
            lengths = _lengths(patches)[:, None] * _lengths(question.embeddings)
            turned: Floats = -(patches @ question.embeddings.T / lengths).mean(1)
            return turned
        mean: Floats = question.hidden[question.after].mean(0)
        found: Floats = image.rows @ mean / (image.derived[LENGTHS] * _lengths(mean))
        return found


def cosines_of(rows: Floats) -> Floats:
    """Cosines [n, n] of tokens [n, width]; that of one with itself is 1, or rounding would choose the first pick."""
    unit = rows / _lengths(rows)[:, None]
    cosines: Floats = unit @ unit.T
    np.fill_diagonal(cosines, 1)
    return cosines


def scaled(relevance: Floats) -> Floats:
    """Relevance from almost 0 to a little over 1, as the released code scales it; all 1 where all are equal."""
    least, span = relevance.min(), relevance.max() - relevance.min()
    return (relevance - least + OFFSET) / span if span > 0 else np.ones_like(relevance)


def greedy(kernel: Floats, count: int) -> Ids:
    """Indices, rising, of `count` tokens of `kernel` [n, n] that greedily maximise the determinant of its submatrix.

    Of equal gains the earlier token is taken. Where no token gains any more, the earliest of the rest are.
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
