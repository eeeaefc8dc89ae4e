"""The thresholds of MustDrop that keep a wanted number of image rows, found with a new bundle before it is in place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.exporter.data.items import Data
from vtx.runtime.api.answer import Options
from vtx.runtime.api.model import Model, load
from vtx.runtime.bundle.bundle import MANIFEST
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import Reduction, parse, word
from vtx.runtime.policies.methods.mustdrop import MustDrop

Report = Callable[[str, int, int], None]
SAMPLES = 20
STEPS = 24  # words that are tried at most
USUAL_STEPS = 10
CLOSE = 0.5  # rows; nearer than this nothing more is tried
DIGITS = 4  # of a threshold
OPEN, SHUT = 0.0, 2.0  # thresholds under which no row leaves, and all but the key rows


@dataclass(frozen=True, slots=True)
class Retain:
    """`tokens`: image rows of a prompt, mean over the layers after pruning and over the questions of `data`."""

    tokens: float
    data: Data

    def check(self, words: Sequence[str]) -> None:
        """Raise RequestError unless there are thresholds to look for."""
        part = _mustdrop(parse(words[0])) if words else None
        if part is None:
            raise RequestError("--retain looks for MustDrop's thresholds; put --reduce mustdrop:192, or like it, first")
        if not part.gamma or not part.alpha:
            raise RequestError("--retain scales gamma and alpha by one factor; give both a start above 0")
        if not 0 < self.tokens < math.inf:
            raise RequestError(f"--retain is {self.tokens}; give a number of vision tokens above 0")


@dataclass(frozen=True, slots=True)
class Found:
    """The word that keeps `tokens` rows, by the `factor` on the thresholds that were given."""

    word: str
    tokens: float
    factor: float


def settle(folder: Path, wanted: Retain, report: Report) -> Found:
    """Find the thresholds with the bundle in `folder` and write the word that was found into its manifest.

    Raises:
        RequestError: the thresholds cannot keep so many, or so few.

    """
    model = load(folder)
    manifest = model.manifest
    found = _Search(model, wanted, parse(manifest.reductions[0]), report).find()
    record = {
        "asked": wanted.tokens,
        "found": found.tokens,
        "factor": found.factor,
        "start": manifest.reductions[0],
        "data": wanted.data.source,
        "questions": len(wanted.data.items),
    }
    changed = dataclasses.replace(
        manifest,
        reductions=(found.word, *manifest.reductions[1:]),
        record={**manifest.record, "retain": record},
    )
    (folder / MANIFEST).write_bytes(changed.to_json().encode("utf-8", "surrogatepass"))
    return found


def _mustdrop(parts: Sequence[Reduction]) -> MustDrop | None:
    return next((part for part in parts if isinstance(part, MustDrop)), None)


class _Search:
    """Bisection on the logarithm of the factor; the mean falls as the factor grows."""

    def __init__(self, model: Model, wanted: Retain, parts: Sequence[Reduction], report: Report) -> None:
        part = _mustdrop(parts)
        assert part is not None
        self._model, self._wanted, self._parts, self._part = model, wanted, parts, part
        self._report, self._tried = report, 0

    def find(self) -> Found:
        most, least = (self._mean(self._word(gamma=limit, alpha=limit)) for limit in (OPEN, SHUT))
        if not least <= self._wanted.tokens <= most:
            raise RequestError(
                f"--retain {self._wanted.tokens:g} cannot be reached: on {self._wanted.data.source} the thresholds of "
                f"{self._part.name} keep from {least:.1f} to {most:.1f} vision tokens; name a number between, or "
                "change key=, layers= or tau="
            )
        best = self._try(1.0)
        low, high = self._bracket(best)
        while self._tried < STEPS and abs(best.tokens - self._wanted.tokens) > CLOSE and high / low > 1.001:
            middle = self._try(math.sqrt(low * high))
            low, high = (middle.factor, high) if middle.tokens > self._wanted.tokens else (low, middle.factor)
            best = min(best, middle, key=lambda found: abs(found.tokens - self._wanted.tokens))
        self._report("thresholds", 1, 1)
        return best

    def _bracket(self, start: Found) -> tuple[float, float]:
        """Factors that keep more than wanted and no more than wanted."""
        part, wanted = self._part, self._wanted.tokens
        lowest, highest = 1e-6, SHUT / min(part.gamma, part.alpha)
        found, last = start, start.factor
        while (found.tokens > wanted) == (start.tokens > wanted) and lowest < found.factor < highest:
            last = found.factor
            factor = min(last * 4, highest) if start.tokens > wanted else max(last / 4, lowest)
            found = self._try(factor)
        return (last, found.factor) if start.tokens > wanted else (found.factor, last)

    def _try(self, factor: float) -> Found:
        gamma, alpha = (float(f"{x * factor:.{DIGITS}g}") for x in (self._part.gamma, self._part.alpha))
        tried = self._word(gamma=gamma, alpha=alpha)
        return Found(tried, self._mean(tried), factor)

    def _word(self, **thresholds: Any) -> str:
        changed = dataclasses.replace(self._part, **thresholds)
        return word([changed if part is self._part else part for part in self._parts])

    def _mean(self, reduce: str) -> float:
        """Image rows under a word, mean over layers after pruning and over the questions."""
        items, total = self._wanted.data.items, 0.0
        for number, item in enumerate(items):
            self._report("thresholds", self._tried * len(items) + number, (STEPS + 2) * len(items))
            with self._model.open(list(item.images)) as images:
                reduced = images.ask(item.question, None, Options(max_new_tokens=1), reduce=reduce).stats.reduced
            assert reduced is not None
            total += reduced.vision_tokens_mean
        self._tried += 1
        return total / len(items)
