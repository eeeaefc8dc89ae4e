"""K and reductions chosen by the time that is left: of those that the owner allows, the most accurate that makes it.

Methods come from a report of vtx-eval, which has their figures and FLOPs. Their times are those that answers take here:
the seconds of a prompt for each of its tokens that was not in the caches, and of each further token.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.options import K
from vtx.runtime.bundle.files import read_named
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import RequestError
from vtx.runtime.scheduler.scheduler import recent

FORMAT = "vtx-eval-1"
MAX_REPORT = 64 << 20
FEW = 8  # tokens of a prompt below which its time says nothing of a whole one


@dataclass(frozen=True, slots=True)
class Allowed:
    """A method that may be chosen: its main figure in the report, and its FLOPs until the first token."""

    name: str
    k: K
    reduce: str
    figure: float
    flops: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """A method, why it was chosen, and the best figure of those that could be."""

    method: Allowed
    why: str
    best: float


class Chooser:
    """Chooses among `methods` by what their answers took. Safe for many threads."""

    def __init__(self, methods: Sequence[Allowed]) -> None:
        self.methods = sorted(methods, key=lambda method: (-method.figure, method.flops))
        self._prompt: dict[Allowed, float] = {}  # seconds a token
        self._token: float | None = None  # seconds of each further token
        self._tokens: float | None = None  # of an answer
        self._lock = threading.Lock()

    def measured(self, method: Allowed, fresh: int, answer: Answer) -> None:
        """An answer is complete, of whose prompt `fresh` tokens were new."""
        tokens = len(answer.token_ids)
        ms = answer.stats.timings_ms
        with self._lock:
            if fresh >= FEW and tokens:
                self._prompt[method] = recent(self._prompt.get(method), ms["first_token"] / 1000 / fresh)
            if tokens > 1:
                self._token = recent(self._token, ms["decode_per_token"] / 1000)
            self._tokens = recent(self._tokens, tokens)

    def prompt_seconds(self, method: Allowed, fresh: int) -> float | None:
        """Expected seconds to the first token of a prompt with `fresh` new tokens; None if nothing is known yet.

        A method without a measurement is judged by its FLOPs, beside those that have one.
        """
        with self._lock:
            rate = self._prompt.get(method)
            if rate is None and self._prompt:
                rates = [seconds * method.flops / max(1.0, other.flops) for other, seconds in self._prompt.items()]
                rate = sum(rates) / len(rates)
        return None if rate is None else rate * fresh

    def quickest(self, fresh: int) -> float | None:
        """The expected seconds to the first token by the quickest method."""
        times = [seconds for method in self.methods if (seconds := self.prompt_seconds(method, fresh)) is not None]
        return min(times, default=None)

    def choose(self, fresh: int, tokens: int, left: float, room: float = math.inf) -> Chosen:
        """The most accurate method by which an answer of at most `tokens` ends in `left` seconds, else the quickest.

        Answers are expected to be as long as recent ones. `fresh` tokens of its prompt are new. Its prompt may take
        `room` seconds, so that others that wait make theirs.
        """
        best = self.methods[0].figure
        further = (self._token or 0.0) * max(0.0, min(tokens, self._tokens or tokens) - 1)
        expected = {method: self.prompt_seconds(method, fresh) for method in self.methods}
        times = {method: seconds for method, seconds in expected.items() if seconds is not None}
        if not times:
            return Chosen(self.methods[0], f"{_ms(left)} left; nothing has been measured yet", best)
        for method, seconds in times.items():
            if seconds + further <= left and seconds <= room:
                return Chosen(method, self._why(method, times, further, left, room), best)
        method = min(times, key=lambda method: (times[method], -method.figure))
        why = self._why(method, times, further, left, room)
        return Chosen(method, f"{why}; none makes it, this is the quickest", best)

    def _why(self, method: Allowed, known: dict[Allowed, float], further: float, left: float, room: float) -> str:
        best = self.methods[0]
        queueing = f", {_ms(max(0.0, room))} of them for the prompt, as others wait" if room < left else ""
        slower = "" if method is best else f"{best.name} takes about {_ms(known[best] + further)}, "
        return f"{_ms(left)} left{queueing}; {slower}{method.name} about {_ms(known[method] + further)}"


def read_allowed(path: Path, most_drop: float) -> tuple[str, list[Allowed]]:
    """The bundle that a report of vtx-eval is about, and its methods within `most_drop` points of the best figure.

    Raises RequestError for another file.
    """
    report = parse_json(read_named(path, MAX_REPORT, error=RequestError), path.name, error=RequestError)
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise RequestError(f"{path.name} is not a report of vtx-eval; give its report.json")
    try:
        task = report["task"]
        bundle = str(report["model"]["bundle"])
        main = task["main"]
        points = 100 if task["main"] in task["shares"] else 1
        methods = [
            Allowed(str(m["name"]), _k(m["k"]), str(m["reduce"]), float(m["figures"][main]["value"]), float(m["flops"]))
            for m in report["methods"]
        ]
        best = max(method.figure for method in methods)
    except (KeyError, TypeError, ValueError) as e:
        raise RequestError(f"{path.name} is a damaged report of vtx-eval ({e!r:.80}); evaluate again") from e
    return bundle, [method for method in methods if points * (best - method.figure) <= most_drop]


def choosers_of(reports: Sequence[Path], most_drop: float, folders: Mapping[str, Path]) -> dict[str, Chooser]:
    """A chooser for each of the bundles in `folders`, by name, that one of the reports is about.

    Raises RequestError for a report about none of them.
    """
    choosers = dict[str, Chooser]()
    for report in reports:
        about, methods = read_allowed(report, most_drop)
        names = [name for name, folder in folders.items() if folder.resolve().name == about]
        if not names:
            raise RequestError(f"{report.name} is about {about}, which is not served; evaluate a bundle of --bundle")
        choosers |= dict.fromkeys(names, Chooser(methods))
    return choosers


def _k(value: Any) -> K:
    return value if value is None or isinstance(value, int) else str(value)


def _ms(seconds: float) -> str:
    return "no limit" if seconds == math.inf else f"{1000 * seconds:.0f} ms"
