"""Plain statements of the methods that choose from the frames of a video, and clips to choose from."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.runtime.vision.layouts.frames import Frames
from vtx.runtime.vision.tokens import ImageTokens

CASES = range(50)
BUDGETS = (0.1, 0.25, 0.6)


def drawn(case: int) -> tuple[NDArray[np.float32], bool]:
    """The tokens [frames, n, width] of one of `CASES`, and whether a newline ends the video.

    By its number a still that drifts, frames of noise, objects that appear in a still, or frames that repeat.
    """
    random, kind = np.random.default_rng(case), case % 4
    frames, each, width = int(random.integers(1, 17)), int(random.integers(1, 50)), int(random.integers(3, 60))
    still = random.standard_normal((each, width)) + random.standard_normal(width)
    clip = np.broadcast_to(still, (frames, each, width)).copy()
    if kind == 0:
        clip += np.cumsum(0.1 * random.standard_normal(clip.shape), 0)
    elif kind == 1:
        clip = random.standard_normal(clip.shape)
    elif kind == 2:
        changed = random.random((frames, each)) < 0.2
        clip[changed] += random.standard_normal((int(changed.sum()), width))
    else:
        clip = random.standard_normal((3, each, width))[random.integers(0, 3, frames)]
    return clip.astype(np.float32), case % 3 == 0


def video_of(clip: NDArray[np.float32], newline: bool) -> ImageTokens:
    """The tokens as the layout of frames arranges them."""
    frames, each, width = clip.shape
    views = [ImageTokens.one_per_patch(frame) for frame in clip]
    return Frames(frames, each, newline=newline).arrange(views, None, 0, 0, np.ones((int(newline), width), np.float32))


def evs(clip: Tensor, keep: float) -> list[int]:
    """The released code: of tokens [frames, n, width] those that enter. `keep` is 1 - its pruning rate."""
    frames, each, _ = clip.shape
    change = 1 - torch.cosine_similarity(clip[1:].double(), clip[:-1].double(), dim=-1).float()
    change = torch.cat([torch.full((1, each), 255.0), change]).flatten()
    count = max(each, int(frames * each * keep + 1e-6))
    return sorted(change.argsort(descending=True, stable=True)[:count].tolist())


def vidcom2(clip: Tensor, keep: float) -> list[int]:
    """The released code, with sums in double; of equal values the first counts, as on a CPU."""
    frames, each, width = clip.shape
    flat = clip.double().reshape(-1, width)
    quiet = flat.var(0, unbiased=False).float().argsort(stable=True)[: int(width * 0.5)]
    unit = torch.nn.functional.normalize(flat[:, quiet], dim=-1).view(frames, each, -1)

    def gaussians(centre: Tensor) -> Tensor:
        squares = (unit - centre).square().sum(-1)
        return torch.stack([torch.exp(-squares / (2 * 2.0**k)) for k in range(-3, 2)]).sum(0)

    of_video = gaussians(unit.mean((0, 1), keepdim=True))
    both = (of_video + gaussians(unit.mean(1, keepdim=True))).float()
    score = -of_video.mean(-1).float().double()
    parts = torch.softmax((score - score.max()) / 0.01, 0)
    shares = (keep * (1 + parts - parts.mean())).clamp(max=1)
    kept = list[int]()
    for frame, share in enumerate(shares):
        count = max(1, int(torch.round(share * each, decimals=9).round()))
        kept += sorted((frame * each + both[frame].argsort(stable=True)[:count]).tolist())
    return kept
