"""A pytest plug-in: the table that says which tests of a suite apply, and selects them.

A row is FILE | TEST | VERDICT | REASON, the first two as patterns; the first row that fits a test counts. "applies":
the test runs as it is. "form": it runs, but the texts and numbers that another model gave are not compared. "absent":
it does not run, for a reason. A test without a row, and a row without a test, are errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

VERDICTS = ("applies", "form", "absent")
EVERY = "*"


@dataclass
class Row:
    """A row of the table; `tests` counts those that it decided about."""

    file: str
    test: str
    verdict: str
    reason: str
    tests: int = field(default=0)


def read(path: Path) -> list[Row]:
    """The rows of a table."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [Row(*(cell.strip() for cell in line.split("|"))) for line in lines if line and not line.startswith("#")]
    wrong = [row for row in rows if row.verdict not in VERDICTS or (row.verdict == "absent" and not row.reason)]
    if wrong:
        raise pytest.UsageError(f"{path.name}: a row has no verdict, or no reason: {wrong[0]}")
    return rows


ROWS = read(Path(os.environ["VTX_SUITE_TABLE"]))
SUITE = Path(os.environ["VTX_SUITE"])


def row_of(path: Path, name: str) -> Row:
    """The row that decides about a test."""
    file = path.relative_to(SUITE).as_posix()
    for row in ROWS:
        named = row.test in (EVERY, name, name.partition("[")[0])
        if fnmatchcase(file, row.file) and (named or fnmatchcase(name, row.test.replace("[", "[[]"))):
            return row
    raise pytest.UsageError(f"{file}::{name} is not in the table")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A file that is absent as a whole is not read: what it imports is not there either."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(SUITE).as_posix()
    rows = [row for row in ROWS if fnmatchcase(file, row.file)]
    if not rows:
        raise pytest.UsageError(f"{file} is not in the table")
    if rows[0].test == EVERY and rows[0].verdict == "absent":
        rows[0].tests += 1
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Keep the tests that apply."""
    left, absent = [], []
    for item in items:
        row = row_of(item.path, item.name)
        row.tests += 1
        item.vtx_form = row.verdict == "form"
        (absent if row.verdict == "absent" else left).append(item)
    config.hook.pytest_deselected(items=absent)
    items[:] = left
    idle = [f"{row.file} | {row.test}" for row in ROWS if not row.tests]
    if idle and not config.option.keyword:
        raise pytest.UsageError(f"rows of the table decide about no test: {'; '.join(idle)}")
