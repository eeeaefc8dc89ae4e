"""The search for thresholds of a reduction that keep a given number of image tokens, run on the new bundle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
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


class Trials:
    """Specs with other thresholds of the bundle's first reduction, tried one by one on the questions of `retain`."""

    def __init__(self, model: Model, retain: Retain, report: Progress) -> None:
        self._model = model
        self._items = retain.data.items
        self._report = report
        self._parts = parse(model.manifest.reductions[0])
        self._part = next(part for part in self._parts if part.thresholds)
        self.name = self._part.name
        self.starts: dict[str, float] = {name: getattr(self._part, name) for name in self._part.thresholds}
        self.count = 0

    def attempt(self, thresholds: Mapping[str, float]) -> tuple[str, float]:
        """The spec with these thresholds, and its image tokens, mean over layers after pruning and over questions."""
        changed = dataclasses.replace(cast(Any, self._part), **thresholds)
        spec = to_spec([changed if other is self._part else other for other in self._parts])
        total = 0.0
        for number, item in enumerate(self._items):
            self._report("thresholds", self.count * len(self._items) + number, (STEPS + 2) * len(self._items))
            with self._model.open(list(item.images)) as images:
                reduced = images.ask(item.question, None, Options(max_new_tokens=1), reduce=spec).stats.reduced
            assert reduced is not None
            total += reduced.vision_tokens_mean
        self.count += 1
        return spec, total / len(self._items)

    def scaled(self, factor: float) -> _Attempt:
        """The spec with the given thresholds times a factor, and its image tokens."""
        thresholds = {name: float(f"{start * factor:.{DIGITS}g}") for name, start in self.starts.items()}
        return _Attempt(factor, *self.attempt(thresholds))

    def nearest(self, target: float) -> _Attempt:
        """The spec found by bisection on the logarithm of the factor; the mean falls as the factor grows."""
        best = trial = self.scaled(1.0)
        # Two factors, of which the first keeps more tokens than the target and the second no more.
        lowest = 1e-6
        highest = SHUT / min(self.starts.values())
        too_many = best.tokens > target
        last = 1.0
        while (trial.tokens > target) == too_many and lowest < trial.factor < highest:
            last = trial.factor
            trial = self.scaled(min(last * 4, highest) if too_many else max(last / 4, lowest))
        low, high = (last, trial.factor) if too_many else (trial.factor, last)
        while self.count < STEPS and abs(best.tokens - target) > CLOSE and high / low > 1.001:
            middle = self.scaled(math.sqrt(low * high))
            low, high = (middle.factor, high) if middle.tokens > target else (low, middle.factor)
            best = min(best, middle, key=lambda trial: abs(trial.tokens - target))
        return best


def fit_thresholds(folder: Path, retain: Retain, report: Progress) -> None:
    """Find the thresholds with the bundle in `folder` and write the spec with them into its manifest.

    They are the given ones times a factor. Raises RequestError.
    """
    model = load(folder)
    target = retain.tokens
    manifest = model.manifest
    trials = Trials(model, retain, report)
    most, least = (trials.attempt(dict.fromkeys(trials.starts, limit))[1] for limit in (OPEN, SHUT))
    if not least <= target <= most:
        raise RequestError(
            f"--retain {target:g} cannot be reached: on {retain.data.source} the thresholds of {trials.name} keep from "
            f"{least:.1f} to {most:.1f} vision tokens; name a number in that range, or change key=, layers= or tau="
        )
    best = trials.nearest(target)
    report("thresholds", 1, 1)
    record = {
        "asked": target,
        "found": best.tokens,
        "factor": best.factor,
        "start": manifest.reductions[0],
        "data": retain.data.source,
        "questions": len(retain.data.items),
    }
    reductions = (best.spec, *manifest.reductions[1:])
    recorded = {**manifest.record, "retain": record}
    seal_manifest(folder, dataclasses.replace(manifest, reductions=reductions, record=recorded))


class _Attempt(NamedTuple):
    """A factor of the thresholds, the spec with them, and the image tokens that it keeps."""

    factor: float
    spec: str
    tokens: float
