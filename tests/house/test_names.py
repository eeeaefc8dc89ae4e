"""Variables are nouns; functions decide little and take few parameters. These counts of the product may only fall."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("commands", "exporter", "tools", "runtime", "plugins")
PARTICIPLES = {
    "found", "given", "made", "seen", "own", "more", "both", "shown", "held", "kept", "whole", "begun", "chosen",
    "wanted", "asked", "known", "left", "said", "stated", "read", "each", "others", "taken", "put", "used", "needed",
    "apart", "alike", "ahead", "told", "ran", "drawn", "counted", "sound",
}  # fmt: skip
MOST_PARTICIPLES = 0.02  # of all names that are bound
MOST_BRANCHES = 15
MOST_PARAMETERS = 6
FUNCTIONS_WITH_MORE_BRANCHES = 0
FUNCTIONS_WITH_MORE_PARAMETERS = 5  # load, act and export, whose options users type, and two of plug-ins
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension)


@cache
def nodes() -> list[ast.AST]:
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    return [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def branches(function: ast.AST) -> int:
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return count


def test_variables_are_nouns() -> None:
    names = [node.id for node in nodes() if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    assert sum(name in PARTICIPLES for name in names) <= MOST_PARTICIPLES * len(names)


def test_few_functions_decide_much() -> None:
    functions = [node.name for node in nodes() if isinstance(node, DEFINITIONS) and branches(node) > MOST_BRANCHES]
    assert len(functions) <= FUNCTIONS_WITH_MORE_BRANCHES, functions


def test_few_functions_take_many_parameters() -> None:
    functions = []
    for node in nodes():
        if isinstance(node, DEFINITIONS):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if sum(argument.arg not in ("self", "cls") for argument in arguments) > MOST_PARAMETERS:
                functions.append(node.name)
    assert len(functions) <= FUNCTIONS_WITH_MORE_PARAMETERS, functions
