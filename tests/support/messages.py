"""The messages that each runtime refuses with, as templates: `{}` for what is put in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
CONSTANT = re.compile(r'\bchar (k\w+)\[\] =\s*"((?:[^"\\]|\\.)*)";')
HELD = "\0"  # where a value stands


def normalised(template: str) -> str:
    """With one `{}` for values side by side, and without the quotes around one."""
    held = re.sub(f"{HELD}+", HELD, template.replace(f"'{HELD}'", HELD))
    return re.sub(r"\s+", " ", held.replace(HELD, "{}")).strip()


def only_in_cpp() -> list[tuple[str, str]]:
    """File and template of every message of C++ that no string of Python gives.

    Python gives a message where its words are the same, or a template of Python has them with values that C++ names:
    at least six in ten of the letters stand in that template itself.
    """
    known = python_messages()
    parts = [(letters(template), template.split("{}"), template) for template in known if "{}" in template]

    def given(template: str) -> bool:
        least = 0.6 * letters(template)
        return template in known or any(
            count >= least
            and all(part in template for part in words)
            and re.fullmatch(re.escape(each).replace(r"\{\}", "(.+?)"), template)
            for count, words, each in parts
        )

    return [
        (path, templates[1])
        for path, templates in cpp_messages()
        if not any(map(given, (*templates, templates[0].removeprefix("{}: "))))
    ]


def letters(template: str) -> int:
    return sum(map(str.isalnum, template))


def cpp_messages(folder: Path = ROOT / "runtime/cpp") -> Iterator[tuple[str, tuple[str, str]]]:
    """File of every refusal of C++, and its template with and without the text of constants."""
    texts = {
        str(path.relative_to(folder)): re.sub(r"(?m)^\s*//.*$|(?<=[;,{)]) +//.*$", "", path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.?pp"))
        if path.relative_to(folder).parts[0] in ("src", "plugins")
    }
    shared = {
        name: value for path, text in texts.items() if path.endswith("hpp") for name, value in CONSTANT.findall(text)
    }
    for path, text in texts.items():
        constants = shared | dict(CONSTANT.findall(text))
        for found in re.finditer(r"\b(?:fail|Error)\((?:vtxcore::)?Kind::\w+, |(?<!void )\bcheck_number\(", text):
            parts = _arguments(text, found.end())
            parts = parts[2:3] if found[0] == "check_number(" else parts  # what is allowed
            yield path, (normalised(_template(parts, constants)), normalised(_template(parts, {})))


def _arguments(text: str, at: int) -> list[str]:
    """The arguments from `at` to the closing bracket."""
    parts, depth, start = list[str](), 0, at
    while depth >= 0:
        if text[at] == '"' or (text[at] == "'" and not text[at - 1].isalnum()):
            quote = text[at]
            at += 1
            while text[at] != quote:
                at += 2 if text[at] == "\\" else 1
        depth += (text[at] in "({[") - (text[at] in ")}]")
        if (text[at] == "," and depth == 0) or depth < 0:
            parts.append(text[start:at].strip())
            start = at + 1
        at += 1
    return parts


def _template(parts: list[str], constants: dict[str, str]) -> str:
    out = ""
    for part in parts:
        name = part.split("::")[-1]
        part = f'"{constants[name]}"' if name in constants else part
        literals = LITERAL.findall(part)
        only = literals and not LITERAL.sub("", part).strip()
        out += "".join(literals).encode().decode("unicode_escape") if only else HELD
    return out


def python_messages(folder: Path = ROOT / "runtime") -> set[str]:
    """The template of every string that the Python runtime puts together."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    constants = dict[str, str]()
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = _python_template(node.value, {})
    strings = ast.JoinedStr, ast.Constant, ast.BinOp
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, strings)]
    found = {normalised(_python_template(node, known)) for node in nodes for known in (constants, {})}
    # `require` puts the place before a message, and the fix behind it
    return (
        found
        | {f"vtx.json: {template}; export again" for template in found}
        | {f"{template}; export again" for template in found}
    )


def _python_template(node: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HELD
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return constants.get(node.value.id, HELD)
    if isinstance(node, ast.JoinedStr):
        return "".join(_python_template(value, constants) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _python_template(node.left, constants) + _python_template(node.right, constants)
    return HELD
