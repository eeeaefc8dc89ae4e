"""Which of the known models fit into a device's memory, in which precision, and how deep the image may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.exporter.estimate.plan import Workload, make_plan
from vtx.exporter.estimate.sizes import KNOWN, ModelSize
from vtx.profiles import Profile

PRECISIONS = ("fp16", "int8", "int4")
WORK = (64, 256)  # text tokens beside one image, and tokens of the answer


@dataclass(frozen=True, slots=True)
class Fit:
    """One model in one precision: `deepest` is the largest K that fits, None where none is needed or none does."""

    model: str
    precision: str
    fits: bool
    deepest: int | None

    def __str__(self) -> str:
        if not self.fits:
            return "no"
        return f"K up to {self.deepest}" if self.deepest else "yes"


def what_fits(
    profile: Profile, usable: int | None = None, precisions: Sequence[str] = PRECISIONS
) -> dict[str, tuple[Fit, ...]]:
    """Every known model in every precision, against `usable` bytes (the profile's own when left out)."""
    free = profile.usable_bytes if usable is None else usable
    return {name: tuple(_fit(model, p, profile, free) for p in precisions) for name, model in KNOWN.items()}


def _fit(model: ModelSize, precision: str, profile: Profile, usable: int) -> Fit:
    image = model.vision.image_tokens if model.vision else 0
    ks = (None, *range(model.decoder.layers, 1, -1))
    plan = make_plan(model, Workload(WORK[0], image, WORK[1]), ks, [precision], profile)
    for depth in plan.depths:  # from no withdrawal to the earliest
        if depth.precisions[precision].peak_bytes <= usable:
            return Fit(model.name, precision, True, depth.k)
    return Fit(model.name, precision, False, None)
