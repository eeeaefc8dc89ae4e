"""The rounds of all contenders as rows of one table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.peers.contenders import US, Contender
from benchmarks.peers.contract import Result

from vtx.tools.bench.series import shown, spread

Rounds = Mapping[Contender, Sequence[Result]]
HEAD = ("contender", "load, s", "image encoder, s", "first token, cold, s", "first token, s", "decode, ms per token",
        "second question, s", "peak RSS, MiB", "ids as vtx fp32", "first / decode / second to vtx")  # fmt: skip


def rows(rounds: Rounds, failed: Mapping[Contender, str]) -> list[list[str]]:
    """Head and one row a contender, ours first among those of a kind; who failed stands with the reason."""
    everybody = [*rounds, *failed]
    kinds = list(dict.fromkeys(c.kind for c in everybody))
    ordered = sorted(everybody, key=lambda c: (kinds.index(c.kind), c.rival != US))
    return [list(HEAD), *(row(c, rounds) if c in rounds else missing(c, failed[c]) for c in ordered)]


def missing(contender: Contender, reason: str) -> list[str]:
    return [contender.name, f"failed: {reason}", *[""] * (len(HEAD) - 2)]


def row(contender: Contender, rounds: Rounds) -> list[str]:
    results = rounds[contender]
    note = contender.module.NOTE
    seconds = [series(results, name, 0.001, 2) for name in ("load", "vision", "cold", "first")]
    return [
        contender.name + (f" ({note})" if note else ""),
        *seconds,
        series(results, "decode", 1, 1),
        series(results, "second", 0.001, 2),
        series(results, "rss", 1, 0),
        "-" if note else agreement(results, rounds.get(Contender(US, "fp32"))),
        ratios(contender, rounds),
    ]


def series(results: Sequence[Result], name: str, factor: float, digits: int) -> str:
    values = [getattr(result, name) for result in results]
    if None in values:
        return "-"
    return shown(spread([factor * value for value in values]), digits)


def agreement(results: Sequence[Result], ours: Sequence[Result] | None) -> str:
    """How many leading ids are those of ours, in the round where it is fewest."""
    if not ours:
        return "-"
    wanted = ours[0].ids
    return f"{min(leading(result.ids, wanted) for result in results)} of {len(wanted)}"


def leading(ids: Sequence[int], wanted: Sequence[int]) -> int:
    for count, (one, other) in enumerate(zip(ids, wanted, strict=True)):
        if one != other:
            return count
    return len(wanted)


def ratios(contender: Contender, rounds: Rounds) -> str:
    """Medians over the rounds of this contender's times by those of ours that it is compared with."""
    ours = base(contender, rounds)
    if ours in (None, contender):
        return "-"
    found = []
    for name in ("first", "decode", "second"):
        pairs = zip(rounds[contender], rounds[ours], strict=True)
        found.append(statistics.median(getattr(theirs, name) / getattr(mine, name) for theirs, mine in pairs))
    return " / ".join(f"{value:.2f}" for value in found) + f" ({ours.precision})"


def base(contender: Contender, rounds: Rounds) -> Contender | None:
    """With a K the same without it; else ours of the same kind, onnxruntime's where it took part, or that in fp32."""
    if contender.k is not None:
        return contender.whole if contender.whole in rounds else None
    ours = [c for c in rounds if c.rival == US and c.k is None]
    return next((c for kind in (contender.kind, "fp32") for c in ours if c.kind == kind), None)
