"""What the rounds say: per precision ours beside the best rival of each figure, and what withdrawal gives.

Ratios are taken within a round, theirs by ours, so that above 1 vtx is faster or smaller: the median, and the extremes
over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.common import markdown
from benchmarks.peers.contenders import CPP, US, Contender
from benchmarks.peers.contract import Result
from benchmarks.peers.table import Rounds, series

FIGURES = {
    "first": ("first token, s", 0.001, 2),
    "decode": ("decode, ms per token", 1, 1),
    "second": ("second question, s", 0.001, 2),
    "rss": ("peak RSS, MiB", 1, 0),
}
TOWER = ("first", "rss")  # what a rival that has no tower, and says so in its note, is not compared by


def in_words(rounds: Rounds) -> str:
    """Markdown tables with a heading each; those without a row are left out."""
    parts = []
    for heading, rows in (
        ("The best rival at each precision, and its figure by ours (median and extremes of the rounds):", best(rounds)),
        ("What withdrawal at K gives: all layers by K, in the same bundle:", withdrawn(rounds)),
    ):
        if len(rows) > 1:
            parts.append(f"\n{heading}\n\n{markdown(rows)}")
    return "\n".join(parts)


def best(rounds: Rounds) -> list[list[str]]:
    """Head and a row for each of ours that has a rival of its kind."""
    rows = [["precision", "vtx", *(head for head, *_ in FIGURES.values())]]
    for ours in rounds:
        rivals = [c for c in rounds if c.rival not in (US, CPP) and c.kind == ours.kind]
        if ours.rival == US and rivals:
            rows.append([ours.kind, ours.precision, *(_beside(ours, name, rivals, rounds) for name in FIGURES)])
    return rows


def _beside(ours: Contender, name: str, rivals: Sequence[Contender], rounds: Rounds) -> str:
    """Our figure, the least of a rival, and the ratio."""
    able = [c for c in rivals if name not in TOWER or not c.module.NOTE]
    mine = series(rounds[ours], name, *FIGURES[name][1:])
    if not able:
        return f"{mine}; no rival"
    rival = min(able, key=lambda c: statistics.median(getattr(result, name) for result in rounds[c]))
    theirs = series(rounds[rival], name, *FIGURES[name][1:])
    return f"{mine}; {rival.name} {theirs}: {ratio(rounds[rival], rounds[ours], lambda r: float(getattr(r, name)))}"


def withdrawn(rounds: Rounds) -> list[list[str]]:
    """Head and a row for each of ours that withdraws and stands beside the same with all layers."""
    heads = ["first token", "the same less the image encoder", "decode", "second question", "peak RSS"]
    taken: list[Callable[[Result], float]] = [
        lambda result: result.first,
        lambda result: result.first - (result.vision or 0),
        lambda result: result.decode,
        lambda result: result.second,
        lambda result: result.rss,
    ]
    rows = [["vtx", *heads]]
    for ours in rounds:
        if ours.k is not None and ours.whole in rounds:
            rows.append([ours.precision, *(ratio(rounds[ours.whole], rounds[ours], of) for of in taken)])
    return rows


def ratio(theirs: Sequence[Result], ours: Sequence[Result], of: Callable[[Result], float]) -> str:
    found = [of(one) / of(other) for one, other in zip(theirs, ours, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
