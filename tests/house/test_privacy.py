"""No object reaches into another's private fields, and a class name means one class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ("cli.py", "commands", "exporter", "profiles", "runtime", "tools")
# Of named tuples, os (whose _exit is documented), torch (its page on serialization names it), ctypes, transformers,
# OpenVINO and onnxruntime.
OTHERS = {
    "_replace", "_exit", "_checkpoint_offset", "_obj", "_attn_implementation", "_PagedAttentionExtension", "_ortvalue",
    "_iobinding",
}  # fmt: skip
# Tests that reach into the package: what they assert has no other sign. They may become fewer.
ALLOWED = {
    "tests/runtime/api/test_conversation.py: conversation._session",  # freed when closed; counted runs of a stage
    "tests/runtime/api/test_turns.py: conversation._turns",  # when another thread has come to its wait
    "tests/runtime/api/test_turns.py: conversation._turns._holder",
    "tests/runtime/prompt/test_text.py: text._masking",  # the path of masked prompts, taken with an ordinary one
    "tests/runtime/prompt/test_text.py: text._template",
}


MAY_REACH = re.compile(r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]|\bsetattr\b")
CLASS = re.compile(r"^ *class _*(\w+)", re.MULTILINE)


def sources(*parts: str) -> Iterator[tuple[str, str]]:
    for part in parts:
        start = ROOT / part
        for path in sorted(start.rglob("*.py")) if start.is_dir() else [start]:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def reaches(tree: ast.Module) -> Iterator[str]:
    """Every `x._name` where x is neither self nor cls, and every `setattr(x, "_name", ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setattr":
            names = [str(arg.value) for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            yield from (ast.unparse(node) for name in names if is_private(name.rpartition(".")[2]))


def all_reaches(*parts: str) -> set[str]:
    """Of files that have what could be one; others need not be parsed."""
    return {
        f"{file}: {reach}"
        for file, text in sources(*parts)
        if MAY_REACH.search(text)
        for reach in reaches(ast.parse(text))
    }


def test_the_package_reaches_into_no_private_field() -> None:
    assert not all_reaches(*PACKAGE, "benchmarks")


def test_tests_reach_only_where_nothing_else_shows_it() -> None:
    assert all_reaches("tests") == ALLOWED


def test_a_class_name_means_one_class() -> None:
    where = defaultdict[str, list[str]](list)
    for file, text in sources(*PACKAGE):
        for name in CLASS.findall(text):
            where[name].append(file)
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_a_reach_is_seen() -> None:
    source = "a._b\nself._c\ncls._d.e\nf()._g\nh.__dict__\nmonkeypatch.setattr(module, '_i', 1)\npair._replace(j=1)\n"
    assert set(reaches(ast.parse(source))) == {"a._b", "f()._g", "monkeypatch.setattr(module, '_i', 1)"}
    for line in ("a._b", "f()._g", "monkeypatch.setattr(module, '_i', 1)", "itself._b"):
        assert MAY_REACH.search(line)
    assert not MAY_REACH.search("self._c\nh.__dict__")
