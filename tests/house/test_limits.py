"""The page of limits says what the constants say."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference"


def test_the_page_of_limits_is_as_the_constants_are() -> None:
    made = runpy.run_path(str(DOCS / "limits.py"))["page"]()
    assert (DOCS / "limits.md").read_text(encoding="utf-8") == made, "run: python docs/reference/limits.py"


def limits_in(path: Path) -> Iterator[str]:
    """Names of a module's constants that begin with MAX or MOST."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign):
            names = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
            yield from (name for name in names if name.startswith(("MAX_", "MOST_")))


def test_every_limit_of_the_code_is_on_the_page() -> None:
    """Each is a row, or is named with the reason why it is none."""
    script = runpy.run_path(str(DOCS / "limits.py"))
    listed = {(limit["module"], limit["name"]) for limit in script["LIMIT"].finditer(script["TEXT"])}
    declared = {
        (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."), name)
        for room in ("runtime", "tools", "exporter", "commands", "profiles")
        for path in (ROOT / room).rglob("*.py")
        for name in limits_in(path)
    }
    assert ("runtime.bundle.seal", "MAX_KEY") in declared, "also where several are assigned at once"
    assert declared - listed == set(script["OTHERS"])
