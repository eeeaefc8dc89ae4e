"""The page of limits says what the constants say."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_limits_is_as_the_constants_are() -> None:
    made = runpy.run_path(str(DOCS / "limits.py"))["page"]()
    assert (DOCS / "limits.md").read_text(encoding="utf-8") == made, "run: python docs/limits.py"
