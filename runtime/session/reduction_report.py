"""The effect of reductions on the images of one answer, for its reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vtx.runtime.policies.base import Policy
from vtx.runtime.session.session import Cut, PrefillResult
from vtx.runtime.vision.tokens import Mask, Patches

PatchIndices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The image tokens that enter `layer`, by patch index in each image; `by` names what left out the others.

    Layer 1: all that entered.
    """

    layer: int
    by: str
    patches: PatchIndices


@dataclass(frozen=True, slots=True)
class ReductionReport:
    """The image tokens that reductions left. A patch index counts in raster order, -1 is the class token.

    `kept`: what entered the decoder, then what was left after each cut. `merged`: first patches of windows that
    became one token. `keys`: what is never dropped. `vision_tokens_mean`: image tokens that leave a layer, those it
    has just dropped not counted, mean over all layers. `notes`: what had no effect, and why.
    """

    kept: tuple[Kept, ...]
    merged: PatchIndices
    keys: PatchIndices
    vision_tokens_mean: float
    notes: tuple[str, ...]


def reduced(policy: Policy, done: PrefillResult) -> ReductionReport:
    """The report of a prefill under `policy`, which has reductions or a K with a rest."""
    entered = Cut(1, tuple(part.name for part in policy.reductions if part.entry()), np.ones(done.vision_tokens, bool))
    merged = np.concatenate([np.zeros(0, bool), *(image.merged for image in done.images)])
    keys = np.zeros(done.vision_tokens, bool)
    for part in policy.reductions:
        marks = part.marks(done.images)
        keys = keys if marks is None else keys | marks
    leaving = [*done.vision_kept[1:], done.vision_kept[-1]]
    return ReductionReport(
        kept=tuple(Kept(cut.layer, "+".join(cut.by), _patches(done.images, cut.kept)) for cut in (entered, *done.cuts)),
        merged=_patches(done.images, merged),
        keys=_patches(done.images, keys),
        vision_tokens_mean=round(sum(leaving) / len(leaving), 2),
        notes=tuple(_without_effect(policy, done)),
    )


def _without_effect(policy: Policy, done: PrefillResult) -> Iterator[str]:
    """A sentence for each reduction that had nothing to leave out, or for all of them."""
    if not done.vision_tokens:
        names = " and ".join(part.name for part in policy.reductions)
        yield f"the prompt has no image: {names} had nothing to leave out"
        return
    k = done.k
    if k is None or done.rest:
        return
    for part in policy.reductions:
        by = done.cuts[-1].by
        idle = [str(cut) for cut in part.needs().cuts if cut > k or (cut == k and part.name not in by)]
        if idle:
            yield f"the image left before layer {k}: {part.name} had nothing to leave out before {', '.join(idle)}"


def _patches(images: Sequence[Patches], mask: Mask) -> PatchIndices:
    """The patch indices of each image's masked tokens, ascending."""
    ends = np.cumsum([len(image) for image in images])
    parts = np.split(mask, ends[:-1]) if len(images) else []
    return tuple(tuple(sorted(image.indices[part].tolist())) for image, part in zip(images, parts, strict=True))
