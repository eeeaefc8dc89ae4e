"""Rows of `rest.py`, one for each question and cell, and the tables of the results that they make."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rest_passages import OF_A_PASSAGE

from vtx.tools.data.intervals import ShareInterval, grouped_share

RESULTS = Path(__file__).parents[1] / "docs/measurements/results/rest.jsonl"


KEPT = "kept"
SAME = 6  # columns of a model's table
RIGHT = 7
KEPT_COLUMNS = (  # the title, the rest, how it is chosen, the kind of question, the share
    ("no rest", "0%", "last", "fact", SAME), ("10%", "10%", "last", "fact", SAME),
    ("20%", "20%", "last", "fact", SAME), ("10% at random", "10%", "random", "fact", SAME),
    ("yes or no, no rest", "0%", "last", "yes-no", RIGHT),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A question under a cell: the share of layer-tokens run, KL of the first token, and its answer."""

    question: int
    kind: str
    k: int
    rest: float
    choice: str
    cost: float
    kl: float
    same: bool
    right: bool


def read_rows(file: Path) -> list[Row]:
    """The rows of whole passages that a run has written, one passage a line."""
    if not file.exists():
        return []
    return [Row(**row) for line in file.read_text(encoding="utf-8").splitlines() for row in json.loads(line)]


def table(name: str, rows: Sequence[Row], caption: str) -> Iterator[dict[str, Any]]:
    """The lines of a table of results: of each cell and kind the cost, and shares with their intervals."""
    columns = ["K", "rest", "choice", "kind", "questions", "cost, %", "same answer, %", "right, %", "mean KL"]
    align = ["---:", "---:", "---", "---", *["---:"] * 5]
    yield {"table": name, "columns": columns, "align": align, "caption": caption}
    groups = defaultdict[tuple[int, float, str, str], list[Row]](list)
    for row in rows:
        groups[row.k, row.rest, row.choice, row.kind].append(row)
    for (k, rest, choice, kind), group in sorted(groups.items()):
        cost, kl = (sum(values) / len(group) for values in zip(*[(row.cost, row.kl) for row in group], strict=True))
        texts = [row.question // (2 * OF_A_PASSAGE) for row in group]
        same = _interval(grouped_share([row.same for row in group], texts))
        right = _interval(grouped_share([row.right for row in group], texts))
        place = [str(k), f"{rest:.0%}", choice] if k else ["none", "100%", "-"]
        yield {"table": name, "row": [*place, kind, str(len(group)), f"{100 * cost:.1f}", same, right, f"{kl:.2g}"]}


def _interval(interval: ShareInterval) -> list[str]:
    return [f"{100 * value:.1f}" for value in (interval.share, interval.low, interval.high)]


def raw_table(name: str, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One line a question: whether the answer is the same, whether it is right, and KL, in each cell."""
    yield {"table": name, "columns": ["question", "kind", "K/rest/choice: same, right, KL"], "align": ["---:"] * 3}
    groups = defaultdict[tuple[int, str], list[str]](list)
    for row in rows:
        facts = f"{row.k}/{row.rest:g}/{row.choice}: {row.same:d}, {row.right:d}, {row.kl:g}"
        groups[row.question, row.kind].append(facts)
    for (question, kind), cells in groups.items():
        yield {"table": name, "row": [str(question), kind, "; ".join(cells)]}


def kept_table() -> Iterator[dict[str, Any]]:
    """The table of the page: what each model of the results keeps at K in the third quarter of its cost."""
    yield {
        "table": KEPT,
        "columns": ["", *(title for title, *_ in KEPT_COLUMNS)],
        "align": ["---", *["---:"] * len(KEPT_COLUMNS)],
    }
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    names = {line["table"]: line.get("caption", "").partition(" ")[0] for line in lines if "columns" in line}
    for model in (name for name in names if f"{name}-rows" in names):
        rows = {tuple(line["row"][:4]): line["row"] for line in lines if line["table"] == model and "row" in line}
        for k in dict.fromkeys(place[0] for place in rows if place[0] != "none"):
            if 70 < float(rows[k, "0%", "last", "fact"][5]) < 90:
                cells = [rows[k, rest, choice, kind][share][0] for _, rest, choice, kind, share in KEPT_COLUMNS]
                yield {"table": KEPT, "row": [f"{names[model]}, K = {k}", *cells]}


def write_tables(tables: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Put tables into the results in place of those of the same names."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    others = [line for line in lines if json.loads(line)["table"] not in tables]
    new = [json.dumps(line, ensure_ascii=False) for table in tables.values() for line in table]
    RESULTS.write_text("\n".join([*others, *new]) + "\n", encoding="utf-8")


def shown(cell: str | Sequence[str]) -> str:
    return cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]} to {cell[2]})"
