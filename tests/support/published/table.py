"""Prints what the last comparison of each published model was: `python -m tests.support.published.table [--tried]`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import click

from tests.support.published.compare import RECORDS, faults_of
from tests.support.published.originals import layout_of
from tests.support.published.places import ROOT, models, published, read
from tests.support.tiny import write_json

COLUMNS = ("model", "files", "export", "ids", "image_tokens", "pixels", "logits", "ends")
TRIED = ROOT / "docs" / "reference" / "published.json"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each model and kind of files."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(str(row[column]) for column in COLUMNS)} |" for row in rows]
    return "\n".join(lines) + "\n"


def tried(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By family the models without a fault, and today's date."""
    families = dict[str, list[str]]()
    faulty = {row["model"] for row in rows if faults_of(row)}
    for name in sorted({row["model"] for row in rows} & models().keys() - faulty):
        config = read(models()[name] / "config.json")
        families.setdefault(layout_of(config) or config["model_type"], []).append(name)
    return {"date": datetime.now(UTC).date().isoformat(), "families": families}


def main() -> None:
    """Print the table, keep it, and with `--tried` write what the page of models says of it."""
    if not models():
        click.echo(f"no published files in {published()}; name a folder of them in PUBLISHED")
        return
    rows = [read(path) for path in sorted(RECORDS.glob("*.json"))]
    (RECORDS.parent / "table.md").write_text(table(rows), encoding="utf-8")
    click.echo(table(rows), nl=False)
    if "--tried" in sys.argv:
        write_json(TRIED, tried(rows))


if __name__ == "__main__":
    main()
