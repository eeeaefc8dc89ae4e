"""Writes the tables of the measurements, and the charts, from `results/`.

    python docs/measurements/tables.py

A page marks a table by `<!-- results: FILE/TABLE -->`: the rows of TABLE in `results/FILE.jsonl`. The first line of a
table there has its columns and how it was measured, each further line one row: a text, or [median, least, most].
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"<!-- results: (?P<file>[\w-]+)/(?P<name>[\w-]+) -->\n(?:\|[^\n]*\n)*(?:\n\*[^\n]*\*\n)?")
WEIGHTS = "bf16"  # of the chart: those that most others run
CHART = ("installed", "as-installed", ROOT / "docs/images/installed.svg")
# By script, which has a function of the same name: the results, the tables of them that are drawn, and the picture.
DECODERS = {
    "curves": ("rest", ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"), ROOT / "docs/images/rest.svg"),
    "forms": (
        "divergence",
        ("qwen2.5-coder-0.5b-shuffled", "qwen2.5-coder-1.5b-shuffled", "gemma-3-270m-shuffled"),
        ROOT / "docs/images/forms.svg",
    ),
}


def pages() -> dict[Path, str]:
    """The text of each page with tables, and of the charts, with the results as they are."""
    rendered: dict[Path, str] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if TABLE.search(text):
            rendered[page] = TABLE.sub(_marked_table, text)
    file, name, picture = CHART
    head, rows = _results(file, name)
    bars = runpy.run_path(str(HERE / "chart.py"))["bars"]
    rendered[picture] = bars(head["columns"], rows, WEIGHTS)
    for script, (file, models, picture) in DECODERS.items():
        tables = {model: _results(file, model.replace(".", "-")) for model in models}
        draw = runpy.run_path(str(HERE / f"{script}.py"))[script]
        rendered[picture] = draw({model: (head["columns"], rows) for model, (head, rows) in tables.items()})
    return rendered


def _marked_table(match: re.Match[str]) -> str:
    head, rows = _results(match["file"], match["name"])
    lines = [head["columns"], head["align"], *([_cell(cell) for cell in row] for row in rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    caption = f"\n*{head['caption']}*\n" if "caption" in head else ""
    return f"<!-- results: {match['file']}/{match['name']} -->\n{text}{caption}"


def _results(file: str, name: str) -> tuple[dict[str, Any], list[list[Any]]]:
    """The first line and the rows of a table; SystemExit if there is none of that name."""
    text = (HERE / "results" / f"{file}.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    table = [line for line in lines if line["table"] == name]
    if not table:
        raise SystemExit(f"results/{file}.jsonl has no table {name}")
    return table[0], [line["row"] for line in table[1:]]


def _cell(cell: Any) -> str:
    return cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]} to {cell[2]})"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
