"""Plain statements of the methods that choose an image's tokens by the image alone, and images to choose from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.runtime.bundle.spec.names import CLIP_PATCHES, CLS_ATTENTION
from vtx.runtime.vision.tokens import NEWLINE, ImageTokens, Patches

Floats = NDArray[np.float32]
CASES = range(40)


@dataclass
class Drawn:
    """An image's tokens, their patches in CLIP's space, the view of each (None: one view) and a question's text."""

    hidden: Floats
    patches: Floats
    views: NDArray[np.int64] | None
    mean: Floats
    embeddings: Floats

    @property
    def key(self) -> str:
        return hashlib.sha256(self.hidden.tobytes()).hexdigest()

    @property
    def image(self) -> ImageTokens:
        count, views = len(self.hidden), self.views
        indices = np.arange(count) if views is None else np.where(views < 0, NEWLINE, np.arange(count))
        signals = {CLIP_PATCHES: self.patches, CLS_ATTENTION: self.patches[:, 0].copy()}
        return ImageTokens(self.hidden, Patches(indices, np.zeros(count, bool), signals, views), key=self.key)


def drawn(case: int) -> Drawn:
    """One of `CASES`: by its number a square, a square with equal tokens, tiles with newlines, or few dimensions."""
    random, layout = np.random.default_rng(case), case % 4
    side, width = int(random.integers(4, 15)), 6 if layout == 3 else int(random.integers(16, 80))
    count, views = side * side, None
    if layout == 2:  # a view of the whole picture, then rows of two tiles side by side, each row with its newline
        row = [1] * side + [2] * side + [-1]
        views = np.array([0] * count + row * side)
        count = len(views)
    hidden = random.standard_normal((count, width)) + 0.5 * random.standard_normal(width)
    patches = random.standard_normal((count, 24)) + random.standard_normal(24)
    if layout == 1:
        twins = random.integers(0, count, (2, count // 3))
        hidden[twins[0]], patches[twins[0]] = hidden[twins[1]], patches[twins[1]]
    mean, embeddings = random.standard_normal((1, width)), random.standard_normal((int(random.integers(1, 4)), 24))
    if views is not None:  # the newline would be the least relevant
        hidden[views < 0], patches[views < 0] = -mean, 0
    return Drawn(*(x.astype(np.float32) for x in (hidden, patches)), views,
                 *(x.astype(np.float32) for x in (mean, embeddings)))  # fmt: skip


def released_cdpruner(case: Drawn, raw: Tensor | None, count: int) -> list[int]:
    """The released code over crops [crops, n, width], in double: `raw` relevance [tokens], None for none.

    Relevance is scaled over all crops, newlines aside; each crop has its kernel and its `count`; all of a smaller one.
    """
    views = torch.zeros(len(case.hidden), dtype=torch.int64) if case.views is None else torch.tensor(case.views)
    relevance = torch.ones(len(views), dtype=torch.float64)
    if raw is not None:
        seen = raw[views >= 0]
        relevance = (raw - seen.min() + 1e-6) / (seen.max() - seen.min())
    kept = list[int]()
    for view in range(int(views.max()) + 1):
        own = (views == view).nonzero()[:, 0]
        x, r, picks = torch.tensor(case.hidden)[own].double(), relevance[own], list[int]()
        unit = x / x.norm(dim=-1, keepdim=True)
        kernel = r[:, None] * (unit @ unit.T).fill_diagonal_(1).float().double() * r
        gain, rows = kernel.diagonal().clone(), torch.zeros(count, len(own), dtype=torch.float64)
        for step in range(min(count, len(own))):
            best = int(gain.argmax())
            rows[step] = (kernel[best] - rows[:step, best] @ rows[:step]) / gain[best].sqrt()
            gain -= rows[step] ** 2
            gain[best] = -torch.inf
            picks.append(best)
        kept += own[picks].tolist()
    return sorted(kept)


def relevance(case: Drawn, text: str) -> Tensor | None:
    """Minus the cosine with CLIP's vectors, or the cosine with the mean embedding, of each token."""
    if text == "none":
        return None
    rows, texts = (case.patches, case.embeddings) if text == "tower" else (case.hidden, case.mean)
    both = torch.tensor(rows).double()[:, None], torch.tensor(texts).double()[None]
    return torch.cosine_similarity(*both, dim=-1).mean(1) * (-1 if text == "tower" else 1)


def random_tokens(case: Drawn, count: int, seed: int) -> list[int]:
    """The `count` tokens with the lowest numbers drawn from `seed` and the image's key."""
    start = int.from_bytes(hashlib.sha256(f"{seed} {case.key}".encode()).digest()[:8], "big")
    numbers = np.random.default_rng(start).random(len(case.hidden)).tolist()
    return sorted(sorted(range(len(numbers)), key=numbers.__getitem__)[:count])


def divprune(tokens: Tensor, count: int) -> list[int]:
    """The released code: tokens [n, width]; of equal distances the first, which is what argmax gives on a CPU."""
    unit = tokens.double() / tokens.double().norm(dim=1, keepdim=True)
    distance = 1 - (unit @ unit.T).float().double().fill_diagonal_(1)
    chosen = list[int]()
    for step in range(count):
        score = distance[chosen].min(0).values if step else distance.topk(2, dim=0, largest=False).values[1]
        score[chosen] = -1
        chosen.append(int(score.argmax()))
    return sorted(chosen)


def divprune_count(share: float, count: int) -> int:
    return max(1, int(torch.round(torch.tensor(share * count, dtype=torch.float64))))
