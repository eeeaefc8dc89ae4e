"""A preset has a paper's name and number: which tokens it keeps equals a plain statement of the released code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.runtime.bundle.spec import names
from vtx.runtime.policies import Boundary, parse
from vtx.runtime.policies.base import Policy, PromptText
from vtx.runtime.vision.tokens import ImageTokens, Patches

V = 576  # of a picture of LLaVA-1.5
Draw = Callable[..., Tensor]
COUNTS = (192, 128, 64)
SEEDS = range(12)


@pytest.fixture(params=SEEDS)
def draw(request: pytest.FixtureRequest) -> Draw:
    generator = torch.Generator().manual_seed(request.param)
    return lambda *shape: torch.randn(*shape, generator=generator)


def number(draw: Draw, low: int, high: int) -> int:
    return low + int(draw(1).abs() * 1e4) % (high - low + 1)


# ---- DART ------------------------------------------------------------------------------------------------------------


def dart(hidden: Tensor, keys: Tensor, first: int, most: int) -> list[int]:
    """The released code behind layer 2, of a sequence [n, width] and its keys [n, all heads]; image tokens from 0."""
    size = keys.abs().sum(1)
    of_image = (size[first : first + V].topk(4).indices + first).tolist()
    of_text = (size[first + V :].topk(4).indices + first + V).tolist()
    kept = set(of_image)
    for pivot in list({*of_image, *of_text}):
        left = torch.tensor([i for i in range(first, first + V) if i not in kept])
        cosines = torch.cosine_similarity(hidden[left], hidden[pivot][None], dim=-1)
        kept |= set(left[cosines.topk(most // 8, largest=False).indices].tolist())
    return sorted(i - first for i in kept)


@pytest.mark.parametrize("count", COUNTS)
def test_dart(draw: Draw, count: int) -> None:
    first, text = number(draw, 1, 60), number(draw, 5, 70)
    raw, keys, weight = draw(first + V + text, 48), draw(first + V + text, 32), draw(48).abs()
    image, after = slice(first, first + V), slice(first + V, None)
    [method] = parse(f"dart:{count}")
    boundary = Boundary(
        3, raw[after].numpy(), (Patches(np.arange(V), np.zeros(V, bool), {}),), np.ones(V, bool),
        image_hidden=lambda: raw[image].numpy(), keys=lambda: (keys[image].numpy(), keys[after].numpy()),
        final_norm=weight.numpy(), positions=lambda: (np.arange(first, first + V), np.arange(first + V, len(raw))),
    )  # fmt: skip
    normed = raw / raw.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * weight
    mask = method.keep_mask(boundary)
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == dart(normed, keys, first, count)
    assert mask.sum() == count + 4
    assert method.needs().cuts == (3,)


# ---- CDPruner --------------------------------------------------------------------------------------------------------


def cdpruner(tokens: Tensor, patches: Tensor, texts: Tensor, count: int) -> list[int]:
    """The released code for LLaVA: tokens [n, width], patches [n, clip] and the question's segments in CLIP's space."""
    unit = tokens / tokens.norm(dim=-1, keepdim=True)
    cosines = patches / patches.norm(dim=-1, keepdim=True) @ (texts / texts.norm(dim=-1, keepdim=True)).T
    relevance = (-cosines).mean(-1)
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    kernel = relevance[:, None] * (unit @ unit.T) * relevance[None]
    gain, rows, chosen = kernel.diagonal().clone(), torch.zeros(count, len(kernel)), list[int]()
    for step in range(count):
        best = int(gain.argmax())
        rows[step] = (kernel[best] - rows[:step, best] @ rows[:step]) / gain[best].sqrt()
        gain -= rows[step] ** 2
        gain[best] = -torch.inf
        chosen.append(best)
    return sorted(chosen)


@pytest.mark.sampled
@pytest.mark.parametrize("count", COUNTS)
def test_cdpruner(draw: Draw, count: int) -> None:
    tokens, patches, texts = draw(V, 512), draw(V, 64), draw(number(draw, 1, 3), 64)
    signals = {names.CLIP_PATCHES: patches.numpy()}
    image = ImageTokens(tokens.numpy(), Patches(np.arange(V), np.zeros(V, bool), signals))
    nothing: NDArray[Any] = np.zeros((0, 512), np.float32)
    question = PromptText(np.zeros(0, np.int64), nothing, np.zeros(0, bool), texts.numpy())
    [method] = parse(f"cdpruner:{count}")
    entry = method.entry()
    assert entry is not None
    found = entry.select(image, question)
    assert found is not None
    assert found.tolist() == cdpruner(tokens, patches, texts, count)
    assert not entry.keeps_positions


# ---- MustDrop --------------------------------------------------------------------------------------------------------

LAYERS = (3, 7, 11, 15)
THRESHOLDS = {"192": (0.001, 0.001), "128": (0.0012, 0.001), "64": (0.011, 0.01), "vizwiz-64": (0.005, 0.001)}


def enters(places: Sequence[int], similarity: Sequence[float | None]) -> list[int]:
    """The released order: merged windows by falling similarity, then the patches left over."""
    merged = sorted((i for i in places if similarity[i] is not None), key=lambda i: -(similarity[i] or 0))
    return [*merged, *(i for i in places if similarity[i] is None)]


def mustdrop(attention: Sequence[Tensor], by_class: Tensor, gamma: float, alpha: float) -> list[list[int]]:
    """What the released code keeps after each of its layers, of the tokens that entered [text, tokens]."""
    keys = set(by_class.topk(math.ceil(0.08 * len(by_class))).indices.tolist())
    there, kept = list(range(len(by_class))), list[list[int]]()
    for layer in attention:
        seen = layer[:, there]
        total, most = seen.sum(0), seen.max(0).values
        dropped = (total < gamma * total.sum()) & (most < alpha)
        there = sorted({j for j, gone in zip(there, dropped.tolist(), strict=True) if not gone} | keys & set(there))
        kept.append(there)
    return kept


@pytest.mark.sampled
@pytest.mark.parametrize("preset", THRESHOLDS)
def test_mustdrop(draw: Draw, preset: str) -> None:
    policy = Policy(parse(f"mustdrop:{preset}"))
    [method], [entry] = policy.parts, policy.entries
    count = number(draw, 150, V)
    windows = set(torch.randperm(count, generator=torch.Generator().manual_seed(count))[:30].tolist())
    similarity = [0.8 + 0.006 * n for n in range(count)]
    known: list[float | None] = [similarity[i] if i in windows else None for i in range(count)]
    merged = np.array([i in windows for i in range(count)])
    last = draw(count).softmax(-1)
    signals = {
        names.CLS_ATTENTION: draw(count).softmax(-1).numpy(), names.CLS_ATTENTION_LAST: last.numpy(),
        names.SIMILARITY: np.array(similarity, np.float32),
    }  # fmt: skip
    image = ImageTokens(np.zeros((count, 8), np.float32), Patches(np.arange(count), merged, signals))
    order = entry.select(image)
    assert order is not None
    assert order.tolist() == enters(range(count), known)
    entered = image.take(order).patches
    attention = [(draw(8, 20, count) + 4 * draw(count)).softmax(-1).mean(0) for _ in LAYERS]
    found, present = list[list[int]](), np.ones(count, bool)
    for layer, given in zip(LAYERS, attention, strict=True):
        there = given[:, torch.from_numpy(present.copy())]
        scores = there.sum(0).numpy(), there.max(0).values.numpy()
        removal = policy.ask(Boundary(layer + 1, np.zeros((1, 8)), (entered,), present, lambda _, s=scores: s))  # type: ignore[misc]
        if removal is not None:
            present = present.copy()
            present[present] = removal.kept
            assert removal.renumbers
            assert removal.shrinks
        found.append(np.flatnonzero(present).tolist())
    assert len(found[-1]) < len(found[0]) < count
    assert found == mustdrop(attention, last[torch.from_numpy(order)], *THRESHOLDS[preset])
    assert method.needs().shrinks == 3


# ---- PyramidDrop -----------------------------------------------------------------------------------------------------


def pyramiddrop(attention: Sequence[Tensor], ratios: Sequence[float]) -> list[list[int]]:
    """What the released code keeps after each of its layers, by what the prompt's last token gives [heads, tokens]."""
    there, kept = torch.arange(V), list[list[int]]()
    for layer, ratio in zip(attention, ratios[1:], strict=True):
        top = layer[:, there].mean(0).topk(int(V * ratio)).indices.sort().values
        there = there[top]
        kept.append(there.tolist())
    return kept


def test_pyramiddrop(draw: Draw) -> None:
    policy = Policy(parse("pyramiddrop:released"))
    attention = [draw(8, V).softmax(-1) for _ in range(3)]
    patches, present, found = Patches(np.arange(V), np.zeros(V, bool), {}), np.ones(V, bool), list[list[int]]()
    assert policy.needs.cuts == (9, 17, 25)
    for layer, given in zip(policy.needs.cuts, attention, strict=True):
        mean = given[:, torch.from_numpy(present.copy())].mean(0).numpy()
        removal = policy.ask(
            Boundary(layer, np.zeros((1, 8)), (patches,), present, next_scores=lambda m=mean: (m, m))  # type: ignore[misc]
        )
        assert removal is not None
        assert (removal.renumbers, removal.shrinks) == (True, False)
        present = present.copy()
        present[present] = removal.kept
        found.append(np.flatnonzero(present).tolist())
    assert found == pyramiddrop(attention, [1.0, 0.5, 0.25, 0.125])
    assert [len(kept) for kept in found] == [288, 144, 72]
