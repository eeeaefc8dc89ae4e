"""Metrics of a server for Prometheus: counters, gauges and histograms in the text format 0.0.4."""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TIMES = {
    "queue": "From a request's arrival until its answer began.",
    "first_token": "From a request's arrival to the first token of its answer.",
    "answer": "From a request's arrival to the end of its answer.",
}
TOKEN = {"token": "Between two tokens of an answer, mean of each answer."}
MOST_KINDS = 200  # of answers, by model, K and reductions, that are counted apart
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Observations in cumulative buckets. Its owner locks it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters of one server. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[int, int] = {}
        self._totals = dict.fromkeys(("prompt_tokens", "reused_tokens", "completion_tokens", "withdrawn_tokens"), 0)
        self._answers: dict[tuple[str, str, str], int] = {}
        self._cancelled = 0
        self._times = {name: Histogram(SECONDS) for name in TIMES}
        self._token = Histogram(TOKEN_SECONDS)

    def request(self, status: int) -> None:
        """A chat request ended with this HTTP status."""
        with self._lock:
            self._requests[status] = self._requests.get(status, 0) + 1

    def cancelled(self) -> None:
        """A client left before its answer was complete."""
        with self._lock:
            self._cancelled += 1

    def answer(
        self, kind: tuple[str, str, str], totals: Mapping[str, int], seconds: Mapping[str, float],
        token_seconds: float | None,
    ) -> None:  # fmt: skip
        """An answer is complete: its token counts by name, its times by those of `TIMES`; None without a 2nd token.

        `kind`: its model, K, and the names of its reductions.
        """
        with self._lock:
            kind = kind if kind in self._answers or len(self._answers) < MOST_KINDS else (kind[0], "other", "other")
            self._answers[kind] = self._answers.get(kind, 0) + 1
            for name in self._totals:
                self._totals[name] += totals[name]
            for name, histogram in self._times.items():
                histogram.observe(seconds[name])
            if token_seconds is not None:
                self._token.observe(token_seconds)

    def text(self, gauges: Mapping[str, float]) -> str:
        """All metrics, with the current `gauges`."""
        with self._lock:
            lines = ["# TYPE vtx_requests_total counter"]
            lines += [f'vtx_requests_total{{status="{code}"}} {n}' for code, n in sorted(self._requests.items())]
            lines += ["# HELP vtx_answers_total Complete answers.", "# TYPE vtx_answers_total counter"]
            for values, n in sorted(self._answers.items()):
                named = zip(("model", "k", "reduce"), values, strict=True)
                labels = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in named)
                lines.append(f"vtx_answers_total{{{labels}}} {n}")
            totals = {"cancelled": self._cancelled, **self._totals}
            for name, value in totals.items():
                lines += [f"# TYPE vtx_{name}_total counter", f"vtx_{name}_total {value}"]
            for name, histogram in (*self._times.items(), ("token", self._token)):
                metric = f"vtx_{name}_seconds"
                lines += [f"# HELP {metric} {(TIMES | TOKEN)[name]}", f"# TYPE {metric} histogram"]
                lines += histogram.lines(metric)
        for name, gauge in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE vtx_{name} {kind}", f"vtx_{name} {gauge:.15g}"]
        return "\n".join(lines) + "\n"
