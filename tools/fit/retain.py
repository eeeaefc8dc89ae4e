"""The search for thresholds of a reduction that keep a given number of image tokens, run on the new bundle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.bundle import seal_manifest
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import parse, to_spec
from vtx.runtime.units import Progress
from vtx.tools.data.items import Data

SAMPLES = 20
STEPS = 24  # the most specs that are tried
CLOSE = 0.5  # tokens; the search stops when it is this near
DIGITS = 4  # of a threshold
OPEN = 0.0  # thresholds that drop no image token, and as many as possible
SHUT = 2.0


@dataclass(frozen=True, slots=True)
class Retain:
    """`tokens`: image tokens of a prompt, mean over the layers after pruning and over the questions of `data`."""

    tokens: float
    data: Data

    def check(self, specs: Sequence[str]) -> None:
        part = next((part for part in parse(specs[0]) if part.thresholds), None) if specs else None
        if part is None:
            raise RequestError("--retain needs a first --reduce with thresholds; name one such as mustdrop:192")
        if not all(getattr(part, name) for name in part.thresholds):
            names = " and ".join(part.thresholds)
            raise RequestError(f"--retain scales {names} of {part.name} by one factor; start each above 0")
        if not 0 < self.tokens < math.inf:
            raise RequestError(f"--retain is {self.tokens}; it must be a number of vision tokens above 0")


def fit_thresholds(folder: Path, retain: Retain, report: Progress) -> None:
    """Find the thresholds with the bundle in `folder` and write the spec with them into its manifest.

    They are the given ones times a factor, found by bisection on its logarithm; the mean falls as the factor grows.
    Raises RequestError.
    """
    model = load(folder)
    items = retain.data.items
    target = retain.tokens
    tried = 0
    manifest = model.manifest
    parts = parse(model.manifest.reductions[0])
    part = next(part for part in parts if part.thresholds)
    starts: dict[str, float] = {name: getattr(part, name) for name in part.thresholds}

    def attempt(thresholds: Mapping[str, float]) -> tuple[str, float]:
        """The spec with these thresholds, and its image tokens, mean over layers after pruning and over questions."""
        nonlocal tried
        changed = dataclasses.replace(cast(Any, part), **thresholds)
        total = 0.0
        spec = to_spec([changed if other is part else other for other in parts])
        for number, item in enumerate(items):
            report("thresholds", tried * len(items) + number, (STEPS + 2) * len(items))
            with model.open(list(item.images)) as images:
                reduced = images.ask(item.question, None, Options(max_new_tokens=1), reduce=spec).stats.reduced
            assert reduced is not None
            total += reduced.vision_tokens_mean
        tried += 1
        return spec, total / len(items)

    def scaled(factor: float) -> _Attempt:
        return _Attempt(factor, *attempt({n: float(f"{start * factor:.{DIGITS}g}") for n, start in starts.items()}))

    most, least = (attempt(dict.fromkeys(starts, limit))[1] for limit in (OPEN, SHUT))
    if not least <= target <= most:
        raise RequestError(
            f"--retain {target:g} cannot be reached: on {retain.data.source} the thresholds of {part.name} keep from "
            f"{least:.1f} to {most:.1f} vision tokens; name a number in that range, or change key=, layers= or tau="
        )
    best = trial = scaled(1.0)
    # Two factors, of which the first keeps more tokens than the target and the second no more.
    lowest = 1e-6
    highest = SHUT / min(starts.values())
    too_many = best.tokens > target
    last = 1.0
    while (trial.tokens > target) == too_many and lowest < trial.factor < highest:
        last = trial.factor
        trial = scaled(min(last * 4, highest) if too_many else max(last / 4, lowest))
    low, high = (last, trial.factor) if too_many else (trial.factor, last)
    while tried < STEPS and abs(best.tokens - target) > CLOSE and high / low > 1.001:
        middle = scaled(math.sqrt(low * high))
        low, high = (middle.factor, high) if middle.tokens > target else (low, middle.factor)
        best = min(best, middle, key=lambda trial: abs(trial.tokens - target))
    report("thresholds", 1, 1)
    record = {
        "asked": target,
        "found": best.tokens,
        "factor": best.factor,
        "start": manifest.reductions[0],
        "data": retain.data.source,
        "questions": len(items),
    }
    reductions = (best.spec, *manifest.reductions[1:])
    recorded = {**manifest.record, "retain": record}
    seal_manifest(folder, dataclasses.replace(manifest, reductions=reductions, record=recorded))


class _Attempt(NamedTuple):
    """A factor of the thresholds, the spec with them, and the image tokens that it keeps."""

    factor: float
    spec: str
    tokens: float
