"""What the pages say about the repository is true of it: files they name exist, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("benchmarks/**/*.md")]
)
NAMED = re.compile(r"`((?:exporter|runtime|profiles|tests|benchmarks|demo|examples)/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
HISTORY = ROOT / "CHANGELOG.md"  # names files as they were called then


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page != HISTORY:
        missing = [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()]
        assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not re.match(r"[a-z]+:", link)]
    assert not [link for link in links if not (page.parent / link).exists()]
