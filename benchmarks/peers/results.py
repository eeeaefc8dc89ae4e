"""The rounds as installed, as results of the documentation: tables of a page of their own, and the README's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import summary
from benchmarks.peers.contenders import CPP, US, Contender
from benchmarks.peers.contract import AUTO, Result
from benchmarks.peers.table import Rounds, agreement

TITLES = {US: "vtx", CPP: "libvtx", "openvino": "OpenVINO GenAI", "llamacpp": "llama.cpp",
          "ortgenai": "onnxruntime-genai", "transformers": "transformers",
          "exporters": "transformers' exporter"}  # fmt: skip
FIGURES = {
    "load": ("load, s", 0.001, 2),
    "vision": ("image encoder, s", 0.001, 2),
    "first": ("first token, s", 0.001, 2),
    "second": ("second question, s", 0.001, 2),
    "decode": ("per token, ms", 1, 1),
    "rss": ("peak memory, MiB", 1, 0),
}
HEADLINE = ("first", "second", "decode", "rss")


def lines(rounds: Rounds, failed: Mapping[Contender, str], about: str) -> list[dict[str, Any]]:
    """What docs/measurements/tables.py reads; `about`: the machine and the rounds, which the README prints."""
    ids = rounds.get(Contender(US, f"fp32@{AUTO}"))
    every = [["contender", "weights", "computed", *(head for head, *_ in FIGURES.values()), "ids as vtx fp32"]]
    for contender, found in rounds.items():
        same = "-" if contender.module.NOTE else agreement(found, ids)
        cells = [_extremes(found, name) for name in FIGURES]
        every.append([title(contender), contender.stored, found[0].how or "-", *cells, same])
    every += [[title(c), c.stored, f"failed: {reason}", *[""] * (len(FIGURES) + 1)] for c, reason in failed.items()]
    best = [[in_full(Contender(US, row[1])), *row[2:]] for row in summary.best(rounds)[1:]]
    gains = [[in_full(Contender(US, row[0])), *row[1:]] for row in summary.withdrawn(rounds)[1:]]
    return [
        *_table("as-installed", every, about),
        *_table("as-installed-best", [["", *(head for head, *_ in summary.FIGURES.values())], *best]),
        *_table("as-installed-withdrawn", [["", *summary.withdrawn(rounds)[0][1:]], *gains]),
        *_table("headline", _headline(rounds), about, page="README.md"),
    ]


def title(contender: Contender) -> str:
    """The contender as pages call it: "vtx, K = 9"; with a dagger if it has no image encoder."""
    k = "" if contender.k is None else f", K = {contender.k}"
    return TITLES[contender.rival] + k + "†" * bool(contender.module.NOTE)


def in_full(contender: Contender) -> str:
    return f"{contender.stored}" + ("" if contender.k is None else f", K = {contender.k}")


def _headline(rounds: Rounds) -> list[list[str]]:
    """For each figure and kind of weights the median of every contender, the best in bold."""
    ks = sorted({c.k for c in rounds if c.rival == US}, key=lambda k: k or 0)
    sides = [(US, k) for k in ks] + [(rival, None) for rival in TITLES if rival not in (US, CPP)]
    heads = [TITLES[rival] + (f", K = {k}" if k is not None else "") for rival, k in sides]
    rows = [["", "weights", *heads]]
    for name in HEADLINE:
        head, factor, digits = FIGURES[name]
        for kind in dict.fromkeys(c.kind for c in rounds):
            cells = []
            values = []
            for rival, k in sides:
                contender = next((c for c in rounds if (c.rival, c.kind, c.k) == (rival, kind, k)), None)
                if contender is None:
                    cells.append("")
                    continue
                value = statistics.median(getattr(result, name) for result in rounds[contender]) * factor
                whole = not (contender.module.NOTE and name in summary.TOWER)
                cells.append(f"{value:,.{digits}f}" + ("" if whole else "†"))
                values += [value] * whole
            best = f"{min(values, default=0):,.{digits}f}"
            rows.append([head, kind, *(f"**{cell}**" if cell == best else cell for cell in cells)])
            head = ""
    return rows


def _extremes(found: Sequence[Result], name: str) -> str | list[str]:
    _, factor, digits = FIGURES[name]
    values = [getattr(result, name) for result in found]
    if None in values:
        return "-"
    shown = [f"{factor * of(values):.{digits}f}" for of in (statistics.median, min, max)]
    return shown[0] if len(values) == 1 else shown


def _table(name: str, rows: Sequence[Sequence[Any]], about: str = "", page: str = "") -> list[dict[str, Any]]:
    align = ["---"] * len(rows[0]) if not page else ["---", "---", *["---:"] * (len(rows[0]) - 2)]
    head = {"table": name, "columns": rows[0], "align": align}
    head |= {key: value for key, value in (("caption", about), ("page", page)) if value}
    return [head, *({"table": name, "row": row} for row in rows[1:])]


def write(target: Path, rounds: Rounds, failed: Mapping[Contender, str], about: str) -> None:
    import json

    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines(rounds, failed, about))
    target.write_text(text, encoding="utf-8")
