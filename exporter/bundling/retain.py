"""The search for thresholds of a reduction that keep a given number of image tokens, run on the new bundle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.bundle import seal_manifest
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import Reduction, parse, to_spec
from vtx.runtime.units import Progress
from vtx.tools.data.items import Data

SAMPLES = 20
STEPS = 24  # the most specs that are tried
CLOSE = 0.5  # tokens; the search stops when it is this near
DIGITS = 4  # of a threshold
OPEN, SHUT = 0.0, 2.0  # thresholds that drop no image token, and as many as possible


@dataclass(frozen=True, slots=True)
class Retain:
    """`tokens`: image tokens of a prompt, mean over the layers after pruning and over the questions of `data`."""

    tokens: float
    data: Data

    def check(self, specs: Sequence[str]) -> None:
        """Raise RequestError unless there are thresholds to look for."""
        part = _with_thresholds(parse(specs[0])) if specs else None
        if part is None:
            raise RequestError("--retain needs a first --reduce with thresholds; name one such as mustdrop:192")
        if not all(getattr(part, name) for name in part.thresholds):
            names = " and ".join(part.thresholds)
            raise RequestError(f"--retain scales {names} of {part.name} by one factor; start each above 0")
        if not 0 < self.tokens < math.inf:
            raise RequestError(f"--retain is {self.tokens}; it must be a number of vision tokens above 0")


def fit_thresholds(folder: Path, retain: Retain, report: Progress) -> None:
    """Find the thresholds with the bundle in `folder` and write the spec with them into its manifest.

    Raises RequestError if no thresholds keep that number of tokens.
    """
    model = load(folder)
    manifest = model.manifest
    best = _ThresholdSearch(model, retain, report).find()
    record = {
        "asked": retain.tokens,
        "found": best.tokens,
        "factor": best.factor,
        "start": manifest.reductions[0],
        "data": retain.data.source,
        "questions": len(retain.data.items),
    }
    reductions = (best.spec, *manifest.reductions[1:])
    changed = dataclasses.replace(manifest, reductions=reductions, record={**manifest.record, "retain": record})
    seal_manifest(folder, changed)


def _with_thresholds(parts: Sequence[Reduction]) -> Reduction | None:
    return next((part for part in parts if part.thresholds), None)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The image tokens that a spec keeps whose thresholds are the given ones times `factor`."""

    spec: str
    tokens: float
    factor: float


class _ThresholdSearch:
    """Bisection on the logarithm of the factor; the mean falls as the factor grows."""

    def __init__(self, model: Model, retain: Retain, report: Progress) -> None:
        self._model, self._retain, self._report, self._tried = model, retain, report, 0
        self._parts = parse(model.manifest.reductions[0])
        part = _with_thresholds(self._parts)
        assert part is not None
        self._part = part
        self._starts: dict[str, float] = {name: getattr(part, name) for name in part.thresholds}

    def find(self) -> _Attempt:
        """The trial nearest to the wanted number of tokens."""
        target = self._retain.tokens
        most, least = (self._mean(self._spec(dict.fromkeys(self._starts, limit))) for limit in (OPEN, SHUT))
        if not least <= target <= most:
            raise RequestError(
                f"--retain {target:g} cannot be reached: on {self._retain.data.source} the thresholds of "
                f"{self._part.name} keep from {least:.1f} to {most:.1f} vision tokens; name a number in that "
                "range, or change key=, layers= or tau="
            )
        best = trial = self._try(1.0)
        # Two factors, of which the first keeps more tokens than the target and the second no more.
        lowest, highest, too_many = 1e-6, SHUT / min(self._starts.values()), best.tokens > target
        last = 1.0
        while (trial.tokens > target) == too_many and lowest < trial.factor < highest:
            last = trial.factor
            trial = self._try(min(last * 4, highest) if too_many else max(last / 4, lowest))
        low, high = (last, trial.factor) if too_many else (trial.factor, last)
        while self._tried < STEPS and abs(best.tokens - target) > CLOSE and high / low > 1.001:
            middle = self._try(math.sqrt(low * high))
            low, high = (middle.factor, high) if middle.tokens > target else (low, middle.factor)
            best = min(best, middle, key=lambda trial: abs(trial.tokens - target))
        self._report("thresholds", 1, 1)
        return best

    def _try(self, factor: float) -> _Attempt:
        spec = self._spec({name: float(f"{start * factor:.{DIGITS}g}") for name, start in self._starts.items()})
        return _Attempt(spec, self._mean(spec), factor)

    def _spec(self, thresholds: Mapping[str, float]) -> str:
        """The spec with these thresholds."""
        changed = dataclasses.replace(cast(Any, self._part), **thresholds)
        return to_spec([changed if part is self._part else part for part in self._parts])

    def _mean(self, reduce: str) -> float:
        """Image tokens under a spec, mean over layers after pruning and over the questions."""
        items, total = self._retain.data.items, 0.0
        for number, item in enumerate(items):
            self._report("thresholds", self._tried * len(items) + number, (STEPS + 2) * len(items))
            with self._model.open(list(item.images)) as images:
                reduced = images.ask(item.question, None, Options(max_new_tokens=1), reduce=reduce).stats.reduced
            assert reduced is not None
            total += reduced.vision_tokens_mean
        self._tried += 1
        return total / len(items)
