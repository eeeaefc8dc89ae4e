"""The page of models says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

from vtx.exporter.checkpoint.families.registry import FAMILIES, REFUSED

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def test_the_page_of_models_is_as_the_code_decides() -> None:
    made = runpy.run_path(str(DOCS / "models.py"))["page"]()
    assert (DOCS / "models.md").read_text(encoding="utf-8") == made, "run: python docs/reference/models.py"


def test_no_family_is_both_exported_and_refused() -> None:
    assert not {family.model_type for family in FAMILIES} & set(REFUSED)
