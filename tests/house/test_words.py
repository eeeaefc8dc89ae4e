"""Wording that readers stumbled over does not come back: in the product's code, its messages and its documentation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(
    path
    for folder in ("commands", "exporter", "profiles", "runtime", "src", "tools", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if (not path.is_symlink() and "vtx" not in path.relative_to(ROOT).parts[2:3]) or path.name == "start.py"
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
QUESTION = re.compile(r"(What|Which|Whether|How|Where|Who|Why|When)\b")
WORDS = {  # pattern: what to write instead
    r"\bis no (directory|file|tower|number)\b": "is not a",
    r"\bfrom (1|one) on\b": "at least 1",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bgo(es)? on with\b": "resume, continue",
    r"\bgone on with\b": "resumed, continued",
    r"\bso many\b": "that many, the number",
    r"\beverybody who\b": "say what is open to whom",
    r"\bsettles? the question\b": "are mutually exclusive",
    r"\bnobody vouches\b": "untrusted",
    r"\bforecast again\b": "new estimate",
    r"\b(spares_rows|_FURTHER|WIDE)\b": "the noun of the thing",
    r"[;:] take (the|a|an|another)\b": "use",
    r"\b([Pp]reviously|[Ff]ormerly|[Ff]irst design|lab notes?|[Aa]s of this run)\b": "what holds: git has the rest",
}


@pytest.mark.parametrize("pattern", WORDS)
def test_wording_that_was_replaced_stays_replaced(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*CODE, *PAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"write instead: {WORDS[pattern]}"


def test_docstrings_are_statements() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and QUESTION.match(text)
    ]
    assert not found
