"""Conversations that an export renders for libvtx, whose engine for chat templates has to render them alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from vtx.runtime.bundle.spec.text_settings import ExampleTurn, PromptExample, TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.prompt.template import ShapingTemplate

EXAMPLE_TIME = datetime(2001, 2, 3, 4, 5, 6)
_PADDED = " \n a\tB  c \u3000"
_TEXTS = (
    _PADDED,
    "x",
    "",
    "\n",
    "\r\nx\r\n",
    "<>&\"'\\ {{ x }} {% y %} {# z #}",
    "12",
    "À é ß ﬁ 猫 👩\u200d🚀 e\u0301",
    "long é " * 750,
    "a </think> b",
)
_SHAPES: tuple[tuple[str | None, ...], ...] = (
    (None, "x"),
    (None, None, _PADDED),
    ("x", None),
    (" x", None, "y ", None, None),
    ("x", "", "y"),
    (_PADDED, " "),
)


def with_examples(settings: TextSettings, template: str) -> TextSettings:
    """The settings with the examples that the template does not refuse. Raises `TemplateError` for other reasons."""
    shaping = ShapingTemplate(template, settings, lambda: EXAMPLE_TIME)
    examples = list[PromptExample]()
    for turns in _conversations():
        chat = list[Message]()
        for turn in turns:
            texts = [Part(type="image") if text is None else Part(type="text", text=text) for text in turn.parts]
            chat.append({"role": turn.role, "content": texts})
        try:
            examples.append(PromptExample(turns, shaping.render(chat, add_generation_prompt=True)))
        except TemplateError:
            continue
    return replace(settings, examples=tuple(examples))


def _conversations() -> Iterator[tuple[ExampleTurn, ...]]:
    """One to nine turns, with and without a system text; each shape of a question, and each text in each role."""
    question = ExampleTurn("user", (None, "first"))
    answer = ExampleTurn("assistant", ("answer",))
    system = ExampleTurn("system", ("rules",))
    for count in (1, 2, 5):
        turns = ((question, answer) * count)[:-1]
        yield turns
        yield (system, *turns)
    for shape in _SHAPES:
        yield (ExampleTurn("user", shape),)
        yield question, answer, ExampleTurn("user", shape)
    for text in _TEXTS:
        yield system, ExampleTurn("user", (None, text)), answer, ExampleTurn("user", ("last",))
        yield question, ExampleTurn("assistant", (text,)), ExampleTurn("user", ("last",))
        yield ExampleTurn("system", (text,)), question
