"""What C++ takes from Python's declarations is what Python declares."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tests.support.scripts import script
from vtx.runtime.bundle.spec.manifest import Manifest

ROOT = Path(__file__).parents[3]


def test_the_names_and_limits_of_cpp_are_those_of_python() -> None:
    names = script("cpp_names")
    assert names.FILE.read_text(encoding="utf-8") == names.header(), "run python scripts/cpp_names.py"


def test_the_register_of_methods_of_cpp_is_that_of_python() -> None:
    methods = script("cpp_methods")
    assert methods.FILE.read_text(encoding="utf-8") == methods.register(), "run python scripts/cpp_methods.py"


def keys(kind: Any, around: tuple[Any, ...] = ()) -> Iterator[str]:
    """The names of a dataclass's fields, and of those of the dataclasses in it, each once: a tower may hold another."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in around:
        for name, inner in get_type_hints(kind).items():
            yield name
            yield from keys(inner, (*around, kind))
    for inner in get_args(kind):
        yield from keys(inner, around)


def test_every_key_that_a_manifest_may_have_is_known_in_cpp() -> None:
    rooms = (
        ROOT / "runtime/cpp/src/bundle" / f"{name}.cpp" for name in ("manifest", "model", "text_settings", "action")
    )
    known = "".join(room.read_text(encoding="utf-8") for room in rooms)
    statistics = {f"{what}_{kind}" for what in ("state", "actions") for kind in ("mean", "std", "low", "high")}
    assert {name for name in keys(Manifest) if f'"{name}"' not in known} == statistics, "they are put together there"


@pytest.mark.slow
def test_the_unicode_tables_of_cpp_are_those_of_python() -> None:
    tables = script("cpp_unicode")
    written = tables.FILE.read_text(encoding="utf-8")
    if not written.startswith(f"// Unicode {unicodedata.unidata_version}."):
        pytest.skip("this Python has another version of Unicode than the tables were made from")
    assert written == tables.text(), "run python scripts/cpp_unicode.py"
