"""Templates that a finite number of conversations cannot prove have no forms; prompts are always transformers'."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError as JinjaError

from tests.support.families import qwen
from tests.support.templates import DEFAULT_SYSTEM, resolved
from tests.support.text import CHATML, MISTRAL, VICUNA, make_tokenizer
from vtx.exporter.checkpoint.original.templates import TEMPLATES as ORIGINAL
from vtx.exporter.checkpoint.template_syntax import check_provable
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.prompt.rendering import Renderer, render_forms
from vtx.runtime.prompt.template import ChatTemplate

LOOP = "{% for m in messages %}"
IMAGES = "m['content'] | selectattr('type', 'equalto', 'image') | list | length"


def inside(snippet: str, template: str = VICUNA) -> str:
    """A template with something more in its loop over messages."""
    found = re.search(r"\{%-? for m in messages %\}", template)
    assert found is not None
    return template[: found.end()] + snippet + template[found.end() :]


# What each of these prints differs from what a few short conversations show.
BEYOND = {
    "something at three images": inside("{% if " + IMAGES + " == 3 %}!{% endif %}"),
    "another text from the fourth turn on": inside("{% if loop.index > 6 %}!{% endif %}"),
    "the last seven messages": VICUNA.replace(LOOP, "{% for m in messages[-7:] %}"),
    "texts cut at 4,000 characters": VICUNA.replace("c['text'] + ' '", "c['text'][:4000] + ' '"),
}
FAMILIES = {
    **ORIGINAL,
    "qwen2_vl": qwen.TEMPLATE.replace("IMAGE", "<image>"),
    "strings": "{% for m in messages %}{% set text = '<|im_start|>' + m.role + '\n\n' + m.content | trim %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "images, videos, texts": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    + "".join(
        "{% for c in m['content'] | selectattr('type', 'equalto', '"
        + kind
        + "') %}{{ '<"
        + kind
        + ">\n' }}{% endfor %}"
        for kind in ("image", "video")
    )
    + "{% if m['role'] != 'assistant' %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] }}{% endfor %}{% else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ c['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "tools": inside(
        "{% if tools %}{{ tools | tojson }}{{ messages | length }}{% endif %}"
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 3].content }}{% endif %}"
        "{% for call in m.tool_calls %}{{ loop.index }}{{ call.name }}{% endfor %}"
    ),
}
UNPROVABLE = {
    "{{ loop.index }}": "prints a number",
    "{{ '%d' % loop.index }}": "prints a number",
    "{{ '%.1s' % m.content[0].text }}": "kind Mod",
    "{% if loop.index0 == 9 %}!{% endif %}": "compares a count or an index with 9",
    "{% if loop.index0 % 7 == 0 %}!{% endif %}": "no limit",
    "{% if (loop.index0 - 5) == 0 %}!{% endif %}": "no limit",
    "{% if messages | length > 5 %}!{% endif %}": "with 5",
    "{% if loop.revindex > 4 %}!{% endif %}": "with 4",
    "{% if messages[5] is defined %}!{% endif %}": "picks items by a number",
    "{% if messages[loop.index0 - 4].role == 'user' %}!{% endif %}": "picks items by a number",
    "{% for x in messages[3:] %}!{% endfor %}": "picks items by a number",
    "{% for x in messages[1:][1:][1:] %}!{% endfor %}": "picks items by a number",
    "{% for x in range(3) %}{% if messages[x] is defined %}!{% endif %}{% endfor %}": "calls something other",
    "{% if m.content[0].text == 'secret' %}!{% endif %}": "compares or searches texts",
    "{% if 'secret' in m.content[0].text %}!{% endif %}": "compares or searches texts",
    "{% if 'q' in m.content[0] %}!{% endif %}": "searches a text",
    "{% if m == messages[0] %}!{% endif %}": "compares or searches texts",
    "{% if m.content[0].text.isdigit() %}!{% endif %}": "isdigit",
    "{% if m.content[0].text.startswith('a') %}!{% endif %}": "startswith",
    "{% if m.content[0].text | length > 1 %}!{% endif %}": "filter length",
    "{% if m.content[0].text | int > 1 %}!{% endif %}": "filter int",
    "{% set q = m.content[0].text %}{% if q[0] == 'a' %}!{% endif %}": "picks items by a number",
    "{% for x in messages | map(attribute='role') %}{{ x }}{% endfor %}": "filter map",
    "{% for x in messages | sort(attribute='role') %}!{% endfor %}": "filter sort",
    "{% set n = namespace(i=0) %}{% set n.i = n.i + 1 %}{{ n.i }}": "prints a number",
    "{% set n = namespace(i=0) %}{% set o = n %}{% set o.i = 1 %}{{ n.i }}": "keeps a number, or a namespace",
    "{% set n = namespace(a=false) %}{% for x in messages %}{% if n.a %}!{% endif %}{% set n.a = true %}{% endfor %}": (
        "a variable that changes"
    ),
    "{% macro p(x) %}{{ x }}{% endmacro %}": "kind Macro",
    "{% for x in messages %}{% break %}{% endfor %}": "kind Break",
    "{{ m.items() | list | length }}": "items",
    "{{ m }}": "as a whole",
}

TEXTS: st.SearchStrategy[str] = st.one_of(
    st.sampled_from(("x", " x ", "", "\n", "a b\n", "123", "q")),
    st.integers(1, 5000).map(lambda length: ("0123456789" * 500)[:length]),
)
TEXT_PARTS: st.SearchStrategy[Part] = TEXTS.map(lambda text: {"type": "text", "text": text})


def message(role: str, most_images: int) -> st.SearchStrategy[Message]:
    images: list[Part] = [{"type": "image"}]
    parts = st.tuples(st.integers(0, most_images), st.lists(TEXT_PARTS, min_size=1, max_size=3), st.booleans())
    return parts.map(lambda p: {"role": role, "content": [*p[1], *images * p[0]] if p[2] else [*images * p[0], *p[1]]})


LONG_CHATS = st.tuples(st.booleans(), st.sampled_from((0, 1, 3, 5, 7))).flatmap(
    lambda shape: st.tuples(
        *([message("system", 0)] if shape[0] else []),
        *(message(role, 5 * (role == "user")) for _ in range(shape[1]) for role in ("user", "assistant")),
        message("user", 5),
    ).map(list)
)
NUMBERS = st.integers(0, 9).map(str)
COMPARED = st.tuples(
    st.sampled_from((IMAGES, "loop.index0", "loop.revindex", "messages | length", "m.content[0].text | length")),
    st.sampled_from(("==", "!=", ">", "<")),
    st.one_of(NUMBERS, st.just("1"), st.just("4000")),
).map(lambda words: f"({words[0]}) {words[1]} {words[2]}")
CONDITIONS = st.one_of(
    COMPARED,
    st.sampled_from(
        ("loop.first", "loop.last", "loop.index0 % 2 == 0", "messages[0].role == 'system'", "m.role == 'user'",
         "m.content[0].type == 'image'", "m.content[-1].type == 'text'", "m.content[0].text", "tools",
         "loop.previtem.content[0].type == 'image'", "messages[-1].content[0].type == 'image'",
         "messages[loop.index0 - 1].role == 'assistant'", "m.content | string | length > 3500",
         "'123' in (m.content | string)", "m.content[0].text == messages[0].content[0].text")
    ),
)  # fmt: skip


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A template in use that prints something more under some condition, or prints less."""
    source = draw(st.sampled_from((VICUNA, MISTRAL, CHATML, DEFAULT_SYSTEM)))
    for number in range(draw(st.integers(1, 2))):
        condition = draw(CONDITIONS if number else COMPARED)
        if draw(st.booleans()):
            condition = f"({condition}) {draw(st.sampled_from(('and', 'or')))} ({draw(CONDITIONS)})"
        source = inside("{% if " + condition + " %}!{% endif %}", source)
    number = draw(st.integers(1, 9))
    match draw(st.integers(0, 5)):
        case 0:
            source = re.sub("in messages %", f"in messages[-{number}:] %", source, count=1)
        case 1:
            source = re.sub(r"(c\.text|c\['text'\])", rf"\1[:{number * 500}]", source)
    return source


@cache
def tokenizer() -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer("first"), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def transformers_prompt(template: str, chat: list[Message], reply: bool) -> str | None:
    """What transformers prints, None where the template refuses."""
    try:
        return str(
            tokenizer().apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=reply, image_token="<image>"
            )
        )
    except JinjaError:
        return None


def hold(template: str, made: TextSettings, chat: list[Message], reply: bool) -> None:
    """The prompt, and that by the forms alone, which libvtx has, are transformers'."""
    expected = transformers_prompt(template, chat, reply)
    try:
        prompt: str | None = Renderer(template, made).render(chat, add_generation_prompt=reply)
    except TemplateError:
        prompt = None
    assert prompt == expected
    if made.forms is not None:
        by_forms = render_forms(made.forms, chat, add_generation_prompt=reply)
        assert by_forms is None or by_forms == expected


def long_chat(turns: int, images: int = 1, text: str = "what?") -> list[Message]:
    question: list[Part] = [*([{"type": "image"}] * images), {"type": "text", "text": text}]
    answer: list[Part] = [{"type": "text", "text": "this"}]
    pairs: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return (pairs * turns)[:-1]


@pytest.mark.parametrize("name", BEYOND)
def test_what_short_conversations_do_not_show_is_printed_as_transformers_prints_it(name: str) -> None:
    made = resolved(BEYOND[name])
    for turns in (1, 3, 4, 6):
        for images in (1, 3, 4):
            hold(BEYOND[name], made, long_chat(turns, images), True)
        hold(BEYOND[name], made, long_chat(turns, text="word " * 900), True)
    assert made.no_forms is not None
    assert "cannot be proven for every conversation" in made.no_forms


@pytest.mark.parametrize("snippet", UNPROVABLE)
def test_what_cannot_be_proven_is_named(snippet: str) -> None:
    made = resolved(inside(snippet))
    assert made.no_forms is not None
    assert "cannot be proven for every conversation" in made.no_forms
    assert UNPROVABLE[snippet] in made.no_forms


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_the_families_keep_their_forms(name: str) -> None:
    made = resolved(FAMILIES[name])
    assert made.no_forms is None
    if name != "strings":  # transformers leaves it to its caller to give such a template strings
        for turns in (1, 5):
            hold(FAMILIES[name], made, long_chat(turns, 4), True)
            hold(FAMILIES[name], made, [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                                        *long_chat(turns, 2)], True)  # fmt: skip


def test_deep_conditions_take_no_longer_for_it() -> None:
    for condition in (" and ".join(["m.role"] * 100), "tools" + " | default(1, true)" * 60):
        check_provable(inside("{% if " + condition + " %}!{% endif %}"))


def check(template: str, chats: list[list[Message]], reply: bool) -> None:
    made = resolved(template)
    probe: list[Message] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "vtx"}]}]
    printed = transformers_prompt(template, probe, False) or ""
    assume(printed.count("<image>") == 1 and "vtx" in printed)  # else vtx takes it for one that reads strings
    ChatTemplate(template)
    for chat in chats:
        hold(template, made, chat, reply)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(templates(), st.lists(LONG_CHATS, min_size=6, max_size=6), st.booleans())
def test_prompts_of_any_template_are_those_of_transformers(
    template: str, chats: list[list[Message]], reply: bool
) -> None:
    check(template, chats, reply)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(templates(), st.lists(LONG_CHATS, min_size=30, max_size=30), st.booleans())
def test_prompts_of_many_templates_are_those_of_transformers(
    template: str, chats: list[list[Message]], reply: bool
) -> None:
    check(template, chats, reply)
