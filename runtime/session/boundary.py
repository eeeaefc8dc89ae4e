"""What a policy may know at the boundary before a stage: scores, hidden states, keys and positions, when asked for."""

from __future__ import annotations

import numpy as np

from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Boundary
from vtx.runtime.policies.policy import Policy
from vtx.runtime.session.caches import PrefixCaches
from vtx.runtime.session.prefix import PrefixSlots
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores


def boundary_before(
    number: int, caches: PrefixCaches, before: PrefixSlots, hidden: HiddenStates, policy: Policy
) -> Boundary:
    """The boundary before stage `number`, for the `hidden` states [n, hidden] of a question that has reached it.

    `before` is what the stage before holds of the prefix. Nothing is computed until the policy asks for it, and what is
    computed holds only while the caches stand as they are.
    """
    prefix, cache, layer = caches.prefix, caches.cache(number - 1), caches.stages[number - 1].last
    slots = np.flatnonzero(prefix.is_vision[before.present])

    def scores(last_only: bool) -> Scores:
        total, most = cache.attention(last_only=last_only)
        if not (np.isfinite(total).all() and np.isfinite(most).all()):
            raise BundleError(f"the attention of layer {layer} is not a number; use --reduce none, or export at fp32")
        return total[slots], most[slots]

    def image_hidden() -> HiddenStates:
        here = caches.prefix_at(number)
        return here.hidden[prefix.is_vision[here.present]]

    def positions() -> tuple[Ids, Ids]:
        here = caches.prefix_at(number)
        if here.positions.ndim > 1:  # of three parts, which order nothing: places in the prompt instead
            return np.flatnonzero(here.present & prefix.is_vision), np.arange(prefix.size, prefix.size + len(hidden))
        first = before.position
        return here.positions[prefix.is_vision[here.present]], np.arange(first, first + len(hidden))

    def keys() -> tuple[HiddenStates, HiddenStates]:
        flat = np.concatenate([*cache.keys()], axis=-1)
        return flat[slots], flat[len(flat) - len(hidden) :]

    present = before.present[prefix.is_vision]
    return Boundary(layer + 1, hidden, prefix.images, present, scores, image_hidden, keys, policy.final_norm, positions)
