"""Writes the tables of the measurement pages from the results in `results/`: `python docs/measurements/tables.py`.

A page marks a table by `<!-- results: NAME -->`; its rows are `results/PAGE.jsonl`. The first line of a table there
has its columns and how it was measured, each further line one row: a text, or [median, least, most].
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE = re.compile(r"<!-- results: (?P<name>[\w-]+) -->\n(?:\|[^\n]*\n)*")


def pages() -> dict[Path, str]:
    """The text of each page, its tables as the results are."""
    made = {}
    for results in sorted((HERE / "results").glob("*.jsonl")):
        page, tables = HERE / f"{results.stem}.md", dict(_tables(results))

        def table(match: re.Match[str], tables: dict[str, str] = tables) -> str:
            return f"<!-- results: {match['name']} -->\n{tables.pop(match['name'])}"

        made[page] = TABLE.sub(table, page.read_text(encoding="utf-8"))
        if tables:
            raise SystemExit(f"{page.name} has no place for the results {', '.join(tables)}")
    return made


def _tables(results: Path) -> Iterator[tuple[str, str]]:
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for head in (line for line in lines if "columns" in line):
        rows = [line["row"] for line in lines if line["table"] == head["table"] and "row" in line]
        cells = [head["columns"], head["align"], *([_cell(cell) for cell in row] for row in rows)]
        yield head["table"], "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _cell(cell: Any) -> str:
    return cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]} to {cell[2]})"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
