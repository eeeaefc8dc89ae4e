"""Plain statements of choosing and merging tokens before the decoder, and images to choose from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.runtime.bundle.spec.names import CLIP_PATCHES, CLS_ATTENTION, RECEIVED
from vtx.runtime.policies import parse
from vtx.runtime.vision.tokens import NEWLINE, ImageTokens, Patches, TowerTokens

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
        indices = np.arange(count)
        if views is not None:  # view after view
            each = (views == 0).sum()
            indices = np.full(count, NEWLINE)
            for view in range(views.max() + 1):
                indices[views == view] = view * each + np.arange(each)
        signals = {
            CLIP_PATCHES: self.patches, CLS_ATTENTION: self.patches[:, 0].copy(), RECEIVED: self.patches[:, 1:3].copy()
        }  # fmt: skip
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


def selected(spec: str, image: ImageTokens) -> list[int]:
    """The tokens of an image or a clip that the method of `spec`, which reads no question, lets in."""
    [method] = parse(spec)
    entry = method.entry()
    assert entry is not None
    assert not entry.uses_question
    assert not entry.keeps_positions
    found = entry.select(image)
    return list(range(len(image))) if found is None else found.tolist()


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
    bits = np.uint64(start) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, len(case.hidden) + 1, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor)
    numbers = (bits ^ bits >> np.uint64(31)).tolist()
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


@dataclass(frozen=True)
class Merging:
    """Tokens that VisionZip makes of an image: their patches, view after view, and weights [n, tokens of the tower]."""

    places: list[int]
    weights: Tensor


def tower(case: int) -> TowerTokens:
    """The tower's tokens of one of `CASES`: one view, one with equal keys, two tiles side by side, or three rows."""
    random, layout = np.random.default_rng(1000 + case), case % 4
    side, size = int(random.integers(3, 15)), int(random.integers(4, 40))
    views, columns = {2: (3, 2), 3: (1 + 2 * 3, 2)}.get(layout, (1, 1))
    keys = random.standard_normal((views, side**2 + 1, size)) + random.standard_normal(size)
    attention = random.random((views, side**2 + 1))
    if layout == 1:
        twins = random.integers(1, side**2 + 1, (2, side**2 // 2))
        keys[:, twins[0]], attention[:, twins[0]] = keys[:, twins[1]], attention[:, twins[1]]
    attention[:, 0] = 2  # what the class token gives to itself, which must not count
    states = random.standard_normal((views, side**2 + 1, 6))
    return TowerTokens(*(x.astype(np.float32) for x in (states, keys, attention)), columns)


def visionzip_view(keys: Tensor, attention: Tensor, dominant: int, contextual: int) -> tuple[list[int], Tensor]:
    """The released code over one view: tokens, of the tower [n], that stay or are targets, and weights of each [_, n].

    `keys` [n, size] are means over heads, `attention` [n] sums; the class token is the first of them, and of
    `dominant`. Of equal values the first counts, as on a CPU.
    """
    count = len(attention)
    order = attention[1:].sort(descending=True, stable=True).indices + 1
    stay = torch.zeros(count, dtype=torch.bool)
    stay[[0, *order[: dominant - 1].tolist()]] = True
    rest = (~stay).nonzero()[:, 0]
    metric = keys[rest].double() / keys[rest].double().norm(dim=-1, keepdim=True)
    step = max(1, len(rest) // contextual)
    targets = torch.arange(0, len(rest), step)[:contextual]
    to_merge = torch.tensor([i for i in range(len(rest)) if i not in targets.tolist()], dtype=torch.int64)
    alike = (metric[to_merge] @ metric[targets].T).float()
    nearest = alike.sort(dim=1, descending=True, stable=True).indices[:, :1]
    one_hot = torch.zeros(len(to_merge), len(targets)).scatter_(1, nearest, 1)
    mean = one_hot.T / one_hot.sum(0).clamp(min=1)[:, None]
    unit = torch.eye(count)
    context = unit[rest[targets]] + mean @ unit[rest[to_merge]]
    return [*stay.nonzero()[:, 0].tolist(), *rest[targets].tolist()], torch.cat([unit[stay], context])


def visionzip(keys: Tensor, attention: Tensor, columns: int, dominant: int, contextual: int) -> Merging:
    """The released code over views [views, n, size] and [views, n]; tiles after the first view, `columns` in a row."""
    views, count = attention.shape
    side = math.isqrt(count - 1)
    parts = [visionzip_view(*given, dominant, contextual) for given in zip(keys, attention, strict=True)]
    grid, others = dict[tuple[int, int], tuple[int, int]](), list[tuple[int, int]]()
    order = [(0, i) for i in range(len(parts[0][0]))]
    for view, (tokens, _) in enumerate(parts[1:], start=1):
        for i, token in enumerate(tokens[1:dominant], start=1):  # onto the grid of all tiles
            y, x = divmod(token - 1, side)
            grid[(view - 1) // columns * side + y, (view - 1) % columns * side + x] = view, i
    others = [(view, 0) for view in range(1, views)]
    others += [(view, i) for view in range(1, views) for i in range(dominant, len(parts[view][0]))]
    order += [*(grid[at] for at in sorted(grid)), *others]
    weights = torch.zeros(len(order), views, count)
    for row, (view, i) in enumerate(order):
        weights[row, view] = parts[view][1][i]
    of_tower = [(view, parts[view][0][i]) for view, i in order]
    places = [view * (count - 1) + token - 1 if token else -1 for view, token in of_tower]
    return Merging(places, weights.flatten(1))


def hiprune(received: Tensor, budget: int, alpha: float) -> list[int]:
    """The released code over one view: of patches [n] those that enter, by the attention [n, 2] that each gets."""
    count, side = len(received), math.isqrt(len(received))
    order = received[:, 0].sort(descending=True, stable=True).indices
    anchors = order[: round(budget * alpha / 5)]
    taken = torch.cat([anchors, anchors - 1, anchors + 1, anchors - side, anchors + side]).clamp(0, count - 1).unique()
    deep = received[:, 1].clone()
    deep[taken] -= 1000  # the code takes 1 off attention, which is below it
    registers = deep.sort(descending=True, stable=True).indices[: budget - len(taken)]
    return sorted({*taken.tolist(), *registers.tolist()})


def merge_windows(x: Tensor, places: list[int], tau: float) -> tuple[Tensor, list[int], list[bool], list[float | None]]:
    """LSM: 3x3 windows of the patch grid whose mean pairwise cosine is at least `tau` become their mean.

    A merged window stands where its first patch stood; rows and columns left over at the border stay.
    """
    patches = [i for i, place in enumerate(places) if place >= 0]
    side = math.isqrt(len(patches))
    means: dict[int, Tensor] = {}  # by the row of a window's first patch
    similarity: dict[int, float] = {}
    gone: set[int] = set()
    for top in range(0, side - side % 3, 3):
        for left in range(0, side - side % 3, 3):
            window = [patches[(top + i) * side + left + j] for i in range(3) for j in range(3)]
            pairs = [(a, b) for i, a in enumerate(window) for b in window[i + 1 :]]
            cosines = [torch.cosine_similarity(x[a], x[b], dim=0) for a, b in pairs]
            mean = torch.stack(cosines).mean()
            if mean >= tau:
                means[window[0]], similarity[window[0]] = x[window].mean(0), float(mean)
                gone |= set(window[1:])
    left_over = [i for i in range(len(x)) if i not in gone]
    rows = torch.stack([means.get(i, x[i]) for i in left_over])
    of_rows = [similarity.get(i) for i in left_over]
    return rows, [places[i] for i in left_over], [i in means for i in left_over], of_rows


def cdpruner(x: Tensor, raw: Tensor | None, count: int, of_tile: Sequence[int] = ()) -> list[int]:
    """CDPruner: one by one the row that makes the determinant of the kernel over the rows chosen so far largest.

    A row multiplies it by what is left of the row's own entry once the chosen rows are accounted for (Schur). Each tile
    has a kernel of its own, and `count` rows; -1 is no tile.
    """
    x = x.double()
    relevance = torch.ones(len(x), dtype=torch.float64)
    tiles = torch.tensor(of_tile or [0] * len(x))
    if raw is not None:
        seen = raw[tiles >= 0]
        relevance = (raw - seen.min() + 1e-6) / (seen.max() - seen.min())
    if of_tile:
        chosen = list[int]()
        for tile in sorted({*of_tile} - {-1}):
            own = (tiles == tile).nonzero()[:, 0]
            least = min(count, len(own))
            chosen += own[torch.tensor(_most_diverse(x[own], relevance[own], least))].tolist()
        return sorted(chosen)
    return _most_diverse(x, relevance, count)


def _most_diverse(x: Tensor, relevance: Tensor, count: int) -> list[int]:
    unit = x / x.norm(dim=-1, keepdim=True)
    cosines = (unit @ unit.T).fill_diagonal_(1).float().double()  # kept with the image, to float32
    kernel = torch.diag(relevance) @ cosines @ torch.diag(relevance)
    chosen: list[int] = []
    while len(chosen) < count:
        beside = kernel[chosen]
        gains = kernel.diagonal() - (beside * torch.linalg.solve(beside[:, chosen], beside)).sum(0)
        gains[chosen] = -math.inf
        chosen.append(int(gains.argmax()))
    return sorted(chosen)


def dart_before(x: Tensor, text: Tensor, count: int, image_pivots: int, text_pivots: int) -> list[int]:
    """DART on input embeddings, as TensorRT-Edge-LLM does it: exactly `count` rows of x [n, hidden] stay."""
    first = sorted(range(len(x)), key=lambda i: -x[i].abs().sum())[: min(image_pivots, count)]
    probes = sorted(range(len(text)), key=lambda i: -text[i].abs().sum())[:text_pivots]
    kept, pivots = set(first), [*(x[i] for i in first), *(text[i] for i in probes)]
    for number, pivot in enumerate(pivots):
        rest = [i for i in range(len(x)) if i not in kept]
        cosine = {i: float(torch.cosine_similarity(x[i], pivot, dim=0)) for i in rest}
        quota = math.ceil((count - len(kept)) / (len(pivots) - number))
        kept |= set(sorted(rest, key=cosine.__getitem__)[:quota])
    return sorted(kept)


def highest(values: list[float] | None, count: int) -> list[int]:
    """Indices of the `count` largest values, in rising order."""
    assert values is not None, "this tower has no class token"
    return sorted(sorted(range(len(values)), key=lambda i: -values[i])[:count])


def share_of(share: float, count: int) -> int:
    """ceil(share * count), free of the rounding of binary fractions."""
    return math.ceil(round(share * count, 9))


def neighbours_turned(x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


def half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
