"""CDPruner: only image tokens that are relevant to the question and unlike each other enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.names import CLIP_PATCHES
from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.options import number_to_keep, share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens

Floats = NDArray[np.float32]
Exact = NDArray[np.float64]
COSINES = "cosines"  # of an image's tokens: they serve every question
LENGTHS = "lengths"
OFFSET = 1e-6  # of the least relevant token, as in the released code
NOISE = 1e-10  # relative: what differs by less is equal


@reduction("cdpruner")
@dataclass(frozen=True, slots=True)
class CDPruner(Reduction, Entry):
    """Of each image, or of each tile of one, `keep` tokens enter: the greedy MAP of a determinantal point process.

    Its kernel is r_i * cos(x_i, x_j) * r_j over the projector's output x. The relevance r, scaled to 0..1, is the
    cosine of x with the mean input embedding of the text after the images: the form for models without a text tower
    (text=embedding). With text=tower it is the authors' form for LLaVA: the cosine of patch and question in CLIP's
    space, its sign turned; of a text in several segments the mean. Presets set it. text=none leaves relevance out, so
    that every question shares one choice. `keep` is a share up to 1, rounded up, or a number of tokens. Tokens enter in
    the order they have, at positions without gaps. An image in tiles has a kernel for each of its views, and relevance
    is scaled over all of them; newlines leave.

    Hundreds of picks depend on each other, and gains often lie within a millionth: sums of float32, whose last bits
    depend on the library, would choose among them. So all of it is float64, but for the cosines, which are kept with
    the image and rounded to float32. libvtx computes the same, and both runtimes choose alike.
    """

    keep: float = share_or_number(0.25)
    text: Literal["embedding", "none", "tower"] = "embedding"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"keep": 192.0, "text": "tower"},
        "128": {"keep": 128.0, "text": "tower"},
        "64": {"keep": 64.0, "text": "tower"},
    }

    per_view: ClassVar[bool] = True
    requires: ClassVar[dict[str, Any]] = {"text_tower": {"text": "tower"}}

    @property
    def uses_question(self) -> bool:
        return self.text != "none"

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, number_to_keep(self.keep, count))

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        views = image.patches.of_views()
        counts = [self.number_kept(len(view), 1) for view in views]
        if counts == [*map(len, views)]:
            return None
        relevance = np.ones(len(image))
        if self.uses_question:
            assert question is not None
            tokens = np.concatenate(views)
            relevance[tokens] = scaled(self._relevance(image, question)[tokens])
        parts = (
            view[greedy(image_cosines(image, None if len(view) == len(image) else view), relevance[view], count)]
            for view, count in zip(views, counts, strict=True)
        )
        return np.sort(np.concatenate([*parts]))

    def _relevance(self, image: ImageTokens, question: PromptText) -> Exact:
        if self.text == "tower":
            assert question.embeddings is not None
            patches = image.patches.signals[CLIP_PATCHES]
            texts = question.embeddings
            lengths = lengths_of(patches)[:, None] * lengths_of(texts)
            turned: Exact = -(np.einsum("nw,sw->ns", patches, texts, dtype=np.float64) / lengths).mean(1)
            return turned
        mean = question.hidden[question.after].mean(0, dtype=np.float64)
        products: Exact = np.einsum("nw,w->n", image.hidden, mean, dtype=np.float64)
        if LENGTHS not in image.derived:
            image.derived[LENGTHS] = lengths_of(image.hidden)
        return products / (image.derived[LENGTHS] * lengths_of(mean))


def lengths_of(rows: NDArray[np.floating]) -> Exact:
    """The length of each of `rows` [..., width]."""
    squares: Exact = np.einsum("...w,...w->...", rows, rows, dtype=np.float64)
    return np.maximum(np.sqrt(squares), 1e-30)


def cosines_of(rows: Floats) -> Floats:
    """Cosines [n, n] of tokens [n, width]; that of one with itself is 1, or rounding would choose the first pick."""
    unit = rows.astype(np.float64)
    unit /= lengths_of(rows)[:, None]
    cosines: Floats = (unit @ unit.T).astype(np.float32)
    np.fill_diagonal(cosines, 1)
    return cosines


def image_cosines(image: ImageTokens, own: Ids | None = None) -> Floats:
    """The cosines of an image's tokens, or of `own`, one of its views; kept with the image."""
    name = COSINES if own is None else f"{COSINES} of the view at {own[0]}"
    if name not in image.derived:
        image.derived[name] = cosines_of(image.hidden if own is None else image.hidden[own])
    return image.derived[name]


def scaled(relevance: Exact) -> Exact:
    """Relevance from almost 0 to a little over 1, as the released code scales it; all 1 where all are equal."""
    least = relevance.min()
    span = relevance.max() - relevance.min()
    return (relevance - least + OFFSET) / span if span > NOISE else np.ones_like(relevance)


def greedy(cosines: Floats, relevance: Exact, count: int) -> Ids:
    """Indices, rising, of `count` tokens that greedily maximise the determinant of their kernel.

    The kernel [n, n] is relevance_i * cosines_ij * relevance_j. Of equal gains the earlier token is taken. Where no
    token gains any more, the earliest of the rest are.
    """
    gain = relevance * relevance
    none = NOISE * gain  # what a token that others have replaced still seems to gain
    mask = np.zeros(len(gain), bool)
    factors = np.zeros((count, len(gain)))
    for step in range(count):
        gains = np.where(mask, -np.inf, gain)
        most = gains.max()
        if most <= 0:
            mask[np.flatnonzero(~mask)[: count - step]] = True
            break
        best = int(np.argmax(gains >= most * (1 - NOISE)))
        row = relevance[best] * cosines[best] * relevance
        factors[step] = factor = (row - factors[:step, best] @ factors[:step]) / np.sqrt(gain[best])
        gain -= factor * factor
        gain[gain <= none] = 0
        mask[best] = True
    return np.flatnonzero(mask)
