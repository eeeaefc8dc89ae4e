"""Writes the tables and the charts of the measurements from `results/`: `python docs/measurements/tables.py`.

A page marks a table by `<!-- results: NAME -->`; its rows are `results/PAGE.jsonl`, unless the table names another
`page`. The first line of a table there has its columns and how it was measured, each further line one row: a text, or
[median, least, most].
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = re.compile(r"<!-- results: (?P<name>[\w-]+) -->\n(?:\|[^\n]*\n)*(?:\n\*[^\n]*\*\n)?")

CHARTS = {  # of a table: the picture, and the function that draws it
    "as-installed": ("installed.svg", "bars"), "the-demo-with-random-tokens-0": ("methods-demo.svg", "scatter"),
    "success": ("actions-toy.svg", "by_k"),
}  # fmt: skip


def pages() -> dict[Path, str]:
    """The text of each page and chart, as the results are."""
    tables: dict[Path, dict[str, str]] = {}
    made = {}
    for results in sorted((HERE / "results").glob("*.jsonl")):
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        for head in (line for line in lines if "columns" in line):
            rows = [line["row"] for line in lines if line["table"] == head["table"] and "row" in line]
            cells = [head["columns"], head["align"], *([_cell(cell) for cell in row] for row in rows)]
            text = "".join(f"| {' | '.join(row)} |\n" for row in cells)
            page = ROOT / head["page"] if "page" in head else HERE / f"{results.stem}.md"
            caption = f"\n*{head['caption']}*\n" if "caption" in head else ""
            tables.setdefault(page, {})[head["table"]] = text + caption
            if head["table"] in CHARTS:
                picture, kind = CHARTS[head["table"]]
                draw = runpy.run_path(str(HERE / "chart.py"))[kind]
                made[ROOT / "docs/images" / picture] = draw(head["columns"], rows)
    for page, named in tables.items():

        def table(match: re.Match[str], named: dict[str, str] = named) -> str:
            return f"<!-- results: {match['name']} -->\n{named.pop(match['name'])}"

        made[page] = TABLE.sub(table, page.read_text(encoding="utf-8"))
        if named:
            raise SystemExit(f"{page.name} has no place for the results {', '.join(named)}")
    return made


def _cell(cell: Any) -> str:
    return cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]} to {cell[2]})"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
