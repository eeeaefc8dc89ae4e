"""What a prefill did: its logits, where vision rows left, and what each layer holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.encoded import Mask, Patches


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Vision rows left before `layer`; `kept` [rows that entered] went on, `by` names who left out the others."""

    layer: int
    by: tuple[str, ...]
    kept: Mask


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill did. Per-layer lists start with layer 1; `slots` count right after the prompt.

    `k` is the first layer without vision rows, None where some stayed. `images` are the vision rows that entered,
    `cuts` where some left.
    """

    logits: NDArray[np.float32]
    k: int | None
    reused_image: bool
    vision_tokens: int
    slots: tuple[int, ...]
    vision_kept: tuple[int, ...]
    images: tuple[Patches, ...] = ()
    cuts: tuple[Cut, ...] = ()
