"""The replies of several servers at the addresses that tell of one, put together as one reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

METRICS = "/metrics"
SLOTS = "/slots"
OWN = (METRICS, SLOTS, "/v1/usage", "/usage")  # of one server's requests


def gathered(path: str, bodies: Sequence[bytes]) -> bytes:
    """The sum of all: metrics by their series, requests one after the other, numbers of what a key has used."""
    if path == METRICS:
        return _summed_metrics([body.decode("utf-8") for body in bodies]).encode("utf-8")
    replies: list[Any] = list(map(json.loads, bodies))
    if path == SLOTS:
        return json.dumps([slot for slots in replies for slot in slots]).encode()
    usage = dict(replies[0])
    for name, value in usage.items():
        if isinstance(value, int):
            usage[name] = sum(reply[name] for reply in replies)
    return json.dumps(usage).encode()


def _summed_metrics(texts: Sequence[str]) -> str:
    """Metrics of Prometheus' format, each metric's series together, as the format has it."""
    metrics = dict[str, dict[str, float | None]]()  # by the line that begins it
    for text in texts:
        series = dict[str, float | None]()
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if line.startswith("# HELP "):
                series = metrics.setdefault(line, {})
            elif line.startswith("#"):
                series[line] = None
            else:
                series[name] = (series.get(name) or 0.0) + float(value)
    lines = list[str]()
    for begin, series in metrics.items():
        values = (name if value is None else f"{name} {value:.15g}" for name, value in series.items())
        lines += [begin, *values]
    return "\n".join(lines) + "\n"
