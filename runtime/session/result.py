"""What a prefill did: its logits, where vision rows left, and what each layer holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies.policy import Policy
from vtx.runtime.session.prefix import Key
from vtx.runtime.vision.tokens import Mask, Patches


@dataclass(frozen=True, slots=True)
class Selection:
    """A question by which vision rows were chosen: the front it followed, its policy, its ids.

    Equal ones choose the same rows, so caches of one are caches of the other.
    """

    key: Key
    policy: Policy
    ids: tuple[int, ...]

    def leads_to(self, key: Key, policy: Policy, tail: Sequence[int]) -> bool:
        """Whether a prompt goes on after this question instead of being a question of its own."""
        return self.key == key and self.policy == policy and common_prefix(self.ids, tail) > 0


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Vision rows left before `layer`; `kept` [rows that entered] went on, `by` names who left out the others."""

    layer: int
    by: tuple[str, ...]
    kept: Mask


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill did. Per-layer lists start with layer 1; `slots` count right after the prompt.

    `k` is the first layer without vision rows, None where some stayed. `images` are the vision rows that entered,
    `cuts` where some left. `asked` is what a chat's next turn goes on after.
    """

    logits: NDArray[np.float32]
    k: int | None
    reused_image: bool
    vision_tokens: int
    slots: tuple[int, ...]
    vision_kept: tuple[int, ...]
    images: tuple[Patches, ...] = ()
    cuts: tuple[Cut, ...] = ()
    asked: Selection | None = None


def common_prefix(cached: Sequence[int], wanted: Sequence[int]) -> int:
    """How many leading ids agree, less one where all do: at least one row must run for its logits."""
    agreed = 0
    while agreed < min(len(cached), len(wanted) - 1) and cached[agreed] == wanted[agreed]:
        agreed += 1
    return agreed
