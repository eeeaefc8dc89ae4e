"""Prints what the last comparison of each published model found: `python -m tests.support.published.table`."""

from __future__ import annotations

import click

from tests.support.published.compare import RECORDS
from tests.support.published.places import models, published, read

COLUMNS = ("model", "files", "export", "ids", "image_tokens", "pixels", "logits", "ends")


def table() -> list[str]:
    """Markdown: a line for each model and kind of files."""
    rows = [read(path) for path in sorted(RECORDS.glob("*.json"))]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return lines + [f"| {' | '.join(str(row[column]) for column in COLUMNS)} |" for row in rows]


if __name__ == "__main__":
    if models():
        text = "\n".join(table())
        (RECORDS.parent / "table.md").write_text(text + "\n", encoding="utf-8")
        click.echo(text)
    else:
        click.echo(f"no published files in {published()}; name a folder of them in PUBLISHED")
