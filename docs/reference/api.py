"""Writes the API pages from the docstrings: `python docs/reference/api.py`. Only public names are on them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vtx
from vtx.runtime.policies.base import Reduction

HERE = Path(__file__).parent
# (heading, text, objects)
SECTIONS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("Loading and exporting", "", (vtx.load, vtx.export)),
    ("Asking", "", (vtx.Model, vtx.Conversation, vtx.Chat)),
    ("Images and videos", "", (vtx.bgr, vtx.video)),
    ("Options", "", (vtx.Options, vtx.Sampling, vtx.Guide, vtx.Tools)),
    ("Answers", "", (vtx.AnswerStream, vtx.AsyncAnswerStream, vtx.Answer, vtx.Stats, vtx.ToolCall)),
    ("Reductions of your own", "A package announces a reduction by an entry point of the group `vtx.policies` with the "
     "name of the\nreduction. It then works in `--reduce`, `vtx.export(reduce=...)` and `ask(reduce=...)`.\n"
     "`examples/python/vtx-policy-every` is an example.", (Reduction,)),
    ("Errors", "All deliberate errors derive from `vtx.VtxError` and have a one-line message.",
     tuple(sorted((getattr(vtx, n) for n in vtx.__all__ if n.endswith("Error")), key=lambda e: e.__name__))),
)  # fmt: skip
MADE_BY_USERS = (
    vtx.Options,
    vtx.Sampling,
    vtx.Guide,
    vtx.Tools,
    vtx.ActionLoop,
    vtx.Continuation,
)  # other classes are what functions return
TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}


LOOP: tuple[tuple[str, str, tuple[Any, ...]], ...] = (("Actions in a loop", "", (vtx.ActionLoop, vtx.Continuation)),)
ACTIONS = "# Python API: actions\n\nThe third page; [the first](api.md) has `Model.act`."
ANSWERS = "# Python API: options, answers, errors\n\nThe second page; [the first](api.md) has models and conversations."


def pages() -> dict[Path, str]:
    """The text of each page."""
    introduction = (HERE / "api-introduction.md.in").read_text(encoding="utf-8").rstrip()
    return {
        HERE / "api.md": _page(introduction, SECTIONS[:3]),
        HERE / "api-answers.md": _page(ANSWERS, SECTIONS[3:]),
        HERE / "api-actions.md": _page(ACTIONS, LOOP),
    }


def _page(introduction: str, sections: tuple[tuple[str, str, tuple[Any, ...]], ...]) -> str:
    parts = [introduction]
    for heading, text, objects in sections:
        parts.append(f"## {heading}")
        if text:
            parts.append(text)
        for each in objects:
            parts.extend(_described(each))
    return "\n\n".join(parts) + "\n"


def _described(item: Any) -> Iterator[str]:
    name = f"vtx.{item.__name__}" if item.__name__ in vtx.__all__ else f"{item.__module__}.{item.__name__}"
    yield f"### {name}"
    if inspect.isclass(item) and issubclass(item, Exception):
        yield _text(item)
        return
    if not inspect.isclass(item) or item in MADE_BY_USERS:
        yield _signature(name, item)
    yield _text(item)
    if not inspect.isclass(item):
        return
    for member, value in vars(item).items():
        call = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if member.startswith("_") or not (inspect.isfunction(call) or isinstance(value, property)):
            continue
        if isinstance(value, property):
            yield f"**`{member}`** (property): {_text(value)}"
        elif value is not vars(item).get("cancel") or member == "cancel":  # an alias is described once
            yield f"#### {item.__name__}.{member}"
            yield _signature(member, call)
            yield _text(call)


def _signature(name: str, call: Callable[..., Any]) -> str:
    parameters = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
    names = []
    for number, parameter in enumerate(parameters):
        first_keyword = parameter.kind is parameter.KEYWORD_ONLY and all(
            other.kind not in (other.KEYWORD_ONLY, other.VAR_POSITIONAL) for other in parameters[:number]
        )
        names += ["*"] if first_keyword else []
        text = re.sub(r": '([^']*)'", r": \1", str(parameter))  # annotations are kept as text
        names.append(re.sub(r"<(?:[^<>]|<[^<>]*>)*>", "...", text).replace("'", '"'))
    line = f"{name}({', '.join(names)})"
    if len(line) > 80:
        line = f"{name}(\n    " + ",\n    ".join(names) + ",\n)"
    return f"```python\n{line}\n```"


def _text(item: Any) -> str:
    """A docstring in Google's form as Markdown."""
    lines = (inspect.getdoc(item) or "").splitlines()
    out: list[str] = []
    section = False
    for line in lines:
        title = re.fullmatch(r"(\w+):", line)
        if title and title[1] in TITLES:
            out += [f"**{TITLES[title[1]]}**", ""]
            section = True
        elif section and (entry := re.match(r"    (\*{0,2}\w+): (.*)", line)):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("    "):
            out.append("  " + line.strip())
        else:
            section = section and not line.strip()
            out.append(line)
    return "\n".join(out).strip()


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
