"""What a prefill did: its logits, where image tokens left, and what each layer holds."""

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
    """A question that selected which image tokens stay: the prefix it followed, its policy, its ids.

    Equal ones select the same tokens, so caches of one are caches of the other.
    """

    key: Key
    policy: Policy
    ids: tuple[int, ...]

    def leads_to(self, key: Key, policy: Policy, suffix: Sequence[int]) -> bool:
        """Whether a prompt continues after this question instead of being a question of its own."""
        return self.key == key and self.policy == policy and common_prefix(self.ids, suffix) > 0


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Image tokens left before `layer`; `kept` [those that entered] continued, `by` names what left out the others."""

    layer: int
    by: tuple[str, ...]
    kept: Mask


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill did. Per-layer lists start with layer 1; `slots` count right after the prompt.

    `k` is the first layer without image tokens, None where some stayed. `images` are the image tokens that entered,
    `reused_layers`: in layers 1 to this one no image token was run, since the caches of an earlier question hold them.
    `reused_tokens`: of the prompt that they served; the prefix counts where no image token was run.
    `cuts` say where some left. A chat's next turn continues after `selection`.
    """

    logits: NDArray[np.float32]
    k: int | None
    reused_image: bool
    reused_layers: int
    reused_tokens: int
    vision_tokens: int
    slots: tuple[int, ...]
    vision_kept: tuple[int, ...]
    images: tuple[Patches, ...] = ()
    cuts: tuple[Cut, ...] = ()
    selection: Selection | None = None


def common_prefix(cached: Sequence[int], wanted: Sequence[int]) -> int:
    """How many leading ids agree, less one where all do: at least one token must run for its logits."""
    agreed = 0
    while agreed < min(len(cached), len(wanted) - 1) and cached[agreed] == wanted[agreed]:
        agreed += 1
    return agreed
