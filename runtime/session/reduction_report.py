"""What reductions did to the images of one answer, for its reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vtx.runtime.policies.policy import Policy
from vtx.runtime.session.session import Cut, PrefillResult
from vtx.runtime.vision.tokens import Mask, Patches

Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that go into `layer` and on, as places of each image; `by`: who left out the others.

    Layer 1: all that entered.
    """

    layer: int
    by: str
    places: Places


@dataclass(frozen=True, slots=True)
class ReductionReport:
    """What reductions left of the images. Places count an image's patches in raster order, -1 is its class token.

    `kept`: what entered the decoder, then what was left after each cut. `merged`: first patches of windows that
    became one row. `keys`: what no prune may drop. `vision_tokens_mean`: vision rows that leave a layer, those its
    prune has just dropped not counted, mean over all layers. `notes`: what was off, and why.
    """

    kept: tuple[Kept, ...]
    merged: Places
    keys: Places
    vision_tokens_mean: float
    notes: tuple[str, ...]


def reduced(policy: Policy, done: PrefillResult) -> ReductionReport | None:
    """The report of a prefill under `policy`; None where it has no reduction."""
    if not policy.reductions:
        return None
    entered = Cut(1, tuple(part.name for part in policy.reductions if part.entry()), np.ones(done.vision_tokens, bool))
    merged = np.concatenate([np.zeros(0, bool), *(image.merged for image in done.images)])
    keys = np.zeros(done.vision_tokens, bool)
    for part in policy.reductions:
        marks = part.marks(done.images)
        keys = keys if marks is None else keys | marks
    leaving = [*done.vision_kept[1:], done.vision_kept[-1]]
    return ReductionReport(
        kept=tuple(Kept(cut.layer, "+".join(cut.by), _places(done.images, cut.kept)) for cut in (entered, *done.cuts)),
        merged=_places(done.images, merged),
        keys=_places(done.images, keys),
        vision_tokens_mean=round(sum(leaving) / len(leaving), 2),
        notes=tuple(_notes(policy, done)),
    )


def _places(images: Sequence[Patches], mask: Mask) -> Places:
    """Of each image the places of its masked rows, rising."""
    ends = np.cumsum([len(image) for image in images])
    parts = np.split(mask, ends[:-1]) if len(images) else []
    return tuple(tuple(sorted(image.places[part].tolist())) for image, part in zip(images, parts, strict=True))


def _notes(policy: Policy, done: PrefillResult) -> list[str]:
    if not done.vision_tokens:
        names = " and ".join(part.name for part in policy.reductions)
        return [f"the prompt has no image: {names} had nothing to leave out"]
    if done.k is None:
        return []
    last, notes = done.cuts[-1], []
    for part in policy.reductions:
        idle = [cut for cut in part.needs().cuts if cut > done.k or (cut == done.k and part.name not in last.by)]
        if idle:
            layers = ", ".join(map(str, idle))
            notes.append(f"the image left before layer {done.k}: {part.name} had nothing to leave out before {layers}")
    return notes
