"""What C++ takes from Python's declarations is what Python declares."""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_names_and_limits_of_cpp_are_those_of_python() -> None:
    names = script("cpp_names")
    assert names.FILE.read_text(encoding="utf-8") == names.header(), "run python scripts/cpp_names.py"


def test_the_unicode_tables_of_cpp_are_those_of_python() -> None:
    tables = script("cpp_unicode")
    written = tables.FILE.read_text(encoding="utf-8")
    if not written.startswith(f"// Unicode {unicodedata.unidata_version}."):
        pytest.skip("this Python has another version of Unicode than the tables were made from")
    assert written == tables.text(), "run python scripts/cpp_unicode.py"
