"""libvtx renders chat templates as Python does, or says that it cannot: never another prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cpp import needs_cpp, output
from tests.support.templates import (
    BEYOND,
    CHATS,
    CONVERSATIONS,
    EXPRESSIONS,
    FAMILIES,
    IRREGULAR,
    LONG_CHATS,
    REGULAR,
    SNIPPETS,
    inside,
    long_chat,
    templates,
)  # fmt: skip
from tests.support.text import VICUNA, make_settings, make_tokenizer
from vtx.exporter.checkpoint.examples import with_examples
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message, parts_of
from vtx.runtime.prompt.template import ShapingTemplate
from vtx.runtime.strict import json_value

pytestmark = needs_cpp

SETTINGS = make_settings(make_tokenizer("first"))
KNOWN = REGULAR | FAMILIES | BEYOND
CASES = st.lists(CHATS | CONVERSATIONS | LONG_CHATS, min_size=5, max_size=5)


def rendered(template: str, chats: Iterable[Sequence[Message]], made: TextSettings = SETTINGS) -> list[dict[str, str]]:
    """Of each chat {"text": ...} or {"error": ...}, by libvtx."""
    request = {"template": template, "text": json_value(made), "chats": [parts(chat) for chat in chats]}
    return [json.loads(line) for line in output("probe", "render", stdin=json.dumps(request).encode()).splitlines()]


def parts(chat: Sequence[Message]) -> list[Any]:
    return [{"role": turn["role"], "content": [*parts_of(turn)]} for turn in chat]


def hold(template: str, chats: Sequence[Sequence[Message]], *, exact: bool = True) -> None:
    """The prompts are Python's; what one refuses the other refuses, and not `exact`, libvtx may refuse more."""
    try:
        python = ShapingTemplate(template, SETTINGS)
        made = with_examples(SETTINGS, template) if exact else SETTINGS
    except TemplateError:
        return  # never in a bundle
    for chat, found in zip(chats, rendered(template, chats, made), strict=True):
        try:
            want: str | None = python.render(parts(chat), add_generation_prompt=True)
        except TemplateError:
            want = None
        if exact or "text" in found:
            assert found.get("text") == want, (template, chat, found)
        else:
            assert found["error"].isprintable()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), CASES)
def test_templates_in_use_give_python_s_prompts(name: str, chats: list[list[Message]]) -> None:
    hold(KNOWN[name], chats)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KNOWN | IRREGULAR)
def test_long_conversations_many_images_and_long_texts_are_rendered(name: str) -> None:
    chats = [long_chat(turns, images) for turns in (1, 3, 4, 6) for images in (1, 3, 4)]
    chats += [long_chat(turns, text="word " * 900) for turns in (1, 4)]
    hold((KNOWN | IRREGULAR)[name], chats, exact=name not in ("upper case", "a date"))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SNIPPETS), CASES)
def test_rare_parts_of_templates_give_python_s_prompts_or_none(snippet: str, chats: list[list[Message]]) -> None:
    hold(inside(snippet), chats, exact=False)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(templates() | EXPRESSIONS.map(lambda e: inside("{{ " + e + " }}")), CASES)
def test_any_template_gives_python_s_prompts_or_none(template: str, chats: list[list[Message]]) -> None:
    hold(template, chats, exact=False)


def test_a_template_that_differs_in_an_example_is_not_rendered() -> None:
    """As of an engine that reads it otherwise: here the bundle's example is of another template."""
    made = with_examples(SETTINGS, VICUNA)
    [found] = rendered(VICUNA.replace("ASSISTANT:", "ASSISTANT: the"), [long_chat(1)], made)
    assert "libvtx cannot render this chat template as the export did (an example differs)" in found["error"]


def test_what_the_engine_lacks_is_named() -> None:
    template = inside("{% for x in messages | sort(attribute='role') %}!{% endfor %}")
    [found] = rendered(template, [long_chat(1)], with_examples(SETTINGS, template))
    assert found["error"].startswith("the chat template fails: NotImplemented: the filter sort")


HOSTILE = {
    "steps": ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "256 MiB"),
    "doubling": ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MiB"),
    "a large product": ("{{ 'x' * 999999999 }}", "1,048,576 characters by *"),
    "replacing": ("{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}", "256 MiB"),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "deeper than 200"),
    "negations": ("{{ " + "not " * 5000 + "1 }}", "deeper than 200"),
    "a long chain": ("{{ 1" + " ~ 1" * 5000 + " }}", "deeper than 200"),
    "a longer chain": ("{{ 1" + " ~ 1" * 30000 + " }}", "20,000 elements"),
    "blocks": ("{% if true %}" * 3000 + "{% endif %}" * 3000, "deeper than 200"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deeper than 200"),
    "nested values": ("{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x] %}{% endfor %}", "64"),
    "a cycle": ("{% set n = namespace(x=1) %}{% set n.x = [n] %}{{ n.x }}", "a namespace in a namespace"),
    "much text": ("{% for i in range(5000) %}" + "x" * 1000 + "{% endfor %}", "prints more than 4,194,304 characters"),
    "a long source": ("x" * 200000, "characters, the limit is 131,072"),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_cost_too_much_end_in_one_line(name: str) -> None:
    template, message = HOSTILE[name]
    asked = "{% if messages | length == 1 and messages[0].content[0].text == 'go' %}" + template + "{% endif %}"
    [found] = rendered(asked, [[{"role": "user", "content": "go"}]])
    assert message in found["error"]
