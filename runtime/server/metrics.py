"""Metrics of a server for Prometheus: counters, gauges and histograms in the text format 0.0.4."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtx.runtime.host.machine import version

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TIMES = {  # what each histogram of seconds is about
    "queue": "From a request's arrival until its answer began.",
    "first_token": "From a request's arrival to the first token of its answer.",
    "answer": "From a request's arrival to the end of its answer.",
}
TOKEN = {"token": "Between two tokens of an answer, mean of each answer."}
COUNTS = {
    "prompt_tokens": "Tokens of the prompts of complete answers.",
    "reused_tokens": "Tokens of prompts that were in the caches already.",
    "completion_tokens": "Tokens of complete answers.",
    "withdrawn_tokens": "Image tokens of prompts that did not reach the last layer.",
}
KEYED = {  # counters of each API key
    "requests": "Requests that have ended, by key and HTTP status.",
    **{name: f"{about.rstrip('.')}, by key." for name, about in COUNTS.items()},
}
FIGURES = {  # of the engines and the process, by name; those that end in _total only grow
    "build_info": "1, with the version of vtx.",
    "resident_memory_bytes": "Memory of the process.",
    "body_bytes": "Bodies of requests that arrive or wait to be read.",
    "sent_image_bytes": "Bytes of images kept under names that clients gave them.",
    "log_lines_dropped_total": "Lines of the access log that nobody read in time.",
    "models_loaded": "Bundles in memory.",
    "requests_active": "Answers that are being computed.",
    "requests_waiting": "Requests that wait for their turn.",
    "kv_kept_bytes": "K, V and images of conversations that are kept for later requests.",
    "image_cache_bytes": "Encoded images that are kept.",
    "conversation_hits_total": "Requests whose beginning was in a kept conversation.",
    "conversation_misses_total": "Requests whose beginning was in none.",
    "image_cache_hits_total": "Images that had been encoded before.",
    "image_cache_misses_total": "Images that were encoded.",
    "batched_passes_total": "Passes that computed tokens of several answers.",
    "batched_tokens_total": "Tokens that were computed in such passes.",
}
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
        lines = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters of one server. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = Counter[int]()
        self._of_keys = Counter[tuple[str, str]]()  # by the counter's name, and the labels with the key's name
        self._totals = dict.fromkeys(COUNTS, 0)
        self._answers: dict[tuple[str, str, str], int] = {}
        self._cancelled = 0
        self._times = {name: Histogram(SECONDS) for name in TIMES}
        self._token = Histogram(TOKEN_SECONDS)

    def request(self, status: int, key: str = "") -> None:
        """A request of the key with this name, if it has one, ended with this HTTP status."""
        with self._lock:
            self._requests[status] += 1
            if key:
                self._of_keys["requests", f'key="{key}",status="{status}"'] += 1

    def cancelled(self) -> None:
        """A client left before its answer was complete."""
        with self._lock:
            self._cancelled += 1

    def answer(
        self,
        kind: tuple[str, str, str],
        totals: Mapping[str, int],
        seconds: Mapping[str, float],
        token_seconds: float | None,
        key: str = "",
    ) -> None:
        """An answer is complete: its token counts by name, its times by those of `TIMES`; None without a 2nd token.

        `kind`: its model, K, and the names of its reductions.
        """
        with self._lock:
            kind = kind if kind in self._answers or len(self._answers) < MOST_KINDS else (kind[0], "other", "other")
            self._answers[kind] = self._answers.get(kind, 0) + 1
            for name in self._totals:
                self._totals[name] += totals[name]
                if key:
                    self._of_keys[name, f'key="{key}"'] += totals[name]
            for name, histogram in self._times.items():
                histogram.observe(seconds[name])
            if token_seconds is not None:
                self._token.observe(token_seconds)

    def text(self, figures: Mapping[str, float]) -> str:
        """All metrics, with the current `figures`."""
        lines = list[str]()

        def begin(name: str, about: str, kind: str) -> str:
            lines.extend([f"# HELP vtx_{name} {about}", f"# TYPE vtx_{name} {kind}"])
            return f"vtx_{name}"

        with self._lock:
            metric = begin("requests_total", "Requests that have ended, by HTTP status.", "counter")
            lines += [f'{metric}{{status="{code}"}} {n}' for code, n in sorted(self._requests.items())]
            metric = begin("answers_total", "Complete answers.", "counter")
            for values, n in sorted(self._answers.items()):
                named = zip(("model", "k", "reduce"), values, strict=True)
                labels = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in named)
                lines.append(f"{metric}{{{labels}}} {n}")
            for counter in dict.fromkeys(name for name, _ in sorted(self._of_keys)):
                metric = begin(f"key_{counter}_total", KEYED[counter], "counter")
                counts = [(labels, n) for (name, labels), n in sorted(self._of_keys.items()) if name == counter]
                lines += [f"{metric}{{{labels}}} {n}" for labels, n in counts]
            about = {"cancelled": "Requests whose client left before the end.", **COUNTS}
            for name, value in {"cancelled": self._cancelled, **self._totals}.items():
                lines.append(f"{begin(f'{name}_total', about[name], 'counter')} {value}")
            for name, histogram in (*self._times.items(), ("token", self._token)):
                lines += histogram.lines(begin(f"{name}_seconds", (TIMES | TOKEN)[name], "histogram"))
        lines.append(f'{begin("build_info", FIGURES["build_info"], "gauge")}{{version="{version("vtx-edge")}"}} 1')
        for name, figure in {**resident(), **figures}.items():
            metric = begin(name, FIGURES[name], "counter" if name.endswith("_total") else "gauge")
            lines.append(f"{metric} {figure:.15g}")
        return "\n".join(lines) + "\n"


def resident() -> dict[str, float]:
    """The memory of this process, if the system is Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"resident_memory_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
