"""Prompt forms say what the template says, or are not there."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.text import CHATML, MISTRAL, SPECIALS, STRINGS, VICUNA, make_settings, make_tokenizer
from vtx.exporter.checkpoint.resolving import with_forms
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.prompt.rendering import render_forms
from vtx.runtime.prompt.shaping import ShapingTemplate
from vtx.runtime.prompt.text import Text
from vtx.runtime.strict import Strict, json_value

DEMO = Path(__file__).parents[3] / "exporter" / "demo_model" / "chat_template.jinja"
LLAMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.first and system %}<<SYS>>\n{{ system | trim }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}{% for c in m.content if c.type == 'image' %}<image>{% endfor %}"
    "{% for c in m.content if c.type == 'text' %}\n{{ c.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no system message here') }}{% endif %}"
    + MISTRAL.removeprefix("{{ bos_token }}{% for m in messages %}")
)
RIGHT = VICUNA.replace("c['text'] + ' '", "c['text'].rstrip() + ' '")
REGULAR = {
    "vicuna": VICUNA,
    "mistral": MISTRAL,
    "chatml": CHATML,
    "strings": STRINGS,
    "llama-2": LLAMA2,
    "default system": DEFAULT_SYSTEM,
    "alternating": ALTERNATING,
    "stripped on the right": RIGHT,
    "demo": DEMO.read_text(),
}
IRREGULAR = {
    "upper case": (VICUNA.replace("c['text'] + ' '", "c['text'] | upper"), "filter upper"),
    "numbered images": (VICUNA.replace("'<image>\n'", "loop.index ~ '<image>'"), "prints a number"),
    "a date": ("{{ strftime_now('%d %B') }}" + VICUNA, "prints the date"),
    "numbered turns": (VICUNA.replace("': ' }}", "': ' }}{{ loop.index }}"), "prints a number"),
    "a thought cut off": (
        CHATML.replace("{{- m.content }}", "{{ m.content }}").replace(
            "{{ c.text }}", "{{ c.text.split('</think>')[-1] }}"
        ),
        r"split\(\)",
    ),
    "a word that matters": (
        VICUNA + "{% if 'json' in messages[-1].content[-1].text %}{}{% endif %}",
        "compares or searches texts",
    ),
    "long texts": (VICUNA.replace("c['text'] + ' '", "c['text'][:1000] + ' '"), "picks items"),
    "texts in turn": (VICUNA.replace("{{ c['text'] + ' ' }}", "{{ c['text'] if loop.first else '' }}"), "part by part"),
    "white space between roles": (
        VICUNA.replace("': ' }}", "': ' }}{% if not loop.first and loop.index0 % 2 == 0 %} {% endif %}"),
        "varies between conversations",
    ),
    "a blank answer left out": (
        VICUNA.replace(
            "{% endfor %}{% endfor %}",
            "{% endfor %}{% if loop.previtem and not loop.previtem.content[0].text %}!{% endif %}{% endfor %}",
        ),
        "differ from the template",
    ),
}


def resolved(template: str) -> TextSettings:
    return with_forms(make_settings(make_tokenizer("first")), template)


FORMS = {name: resolved(template) for name, template in REGULAR.items()}
SHAPING = {name: ShapingTemplate(template, FORMS[name]) for name, template in REGULAR.items()}


@pytest.mark.parametrize("name", REGULAR)
def test_regular_templates_have_forms(name: str) -> None:
    assert FORMS[name].no_forms is None
    assert FORMS[name].forms is not None


def test_a_template_that_leaves_out_an_empty_system_message_has_forms_that_do_not_cover_it() -> None:
    chat: list[Message] = [{"role": "system", "content": " "}, {"role": "user", "content": "x"}]
    assert not held_to_the_template("llama-2", chat, True)
    assert held_to_the_template("chatml", chat, True)


@pytest.mark.parametrize("name", IRREGULAR)
def test_irregular_templates_have_none_and_a_reason(name: str) -> None:
    template, reason = IRREGULAR[name]
    settings = resolved(template)
    assert settings.forms is None
    assert settings.no_forms is not None
    assert re.search(reason, settings.no_forms), settings.no_forms


SHREDS = (
    "x",
    " ",
    "\n",
    "\t",
    "\u3000",
    "猫",
    "USER:",
    "<<SYS>>",
    "[INST]",
    "image",
    "'",
    "{{",
    "}}",
    "%}",
    "\\n",
    "0",
    ":",
)
WORDS = st.lists(st.sampled_from(SHREDS) | st.text(max_size=3), max_size=8).map("".join)
TEXT_PART: st.SearchStrategy[Part] = WORDS.map(lambda text: {"type": "text", "text": text})
IMAGE_PART: st.SearchStrategy[Part] = st.just({"type": "image"})


def messages(role: str) -> st.SearchStrategy[Message]:
    parts = st.lists(TEXT_PART | IMAGE_PART if role == "user" else TEXT_PART, max_size=4)
    return st.one_of(WORDS, parts).map(lambda content: {"role": role, "content": content})


CONVERSATIONS = st.lists(st.sampled_from(("system", "user", "assistant")), min_size=1, max_size=6).flatmap(
    lambda roles: st.tuples(*map(messages, roles)).map(list)
)
CHATS = st.tuples(st.booleans(), st.integers(0, 2)).flatmap(
    lambda shape: st.tuples(
        *([messages("system")] if shape[0] else []),
        *(messages(role) for _ in range(shape[1]) for role in ("user", "assistant")),
        messages("user"),
    ).map(list)
)


def held_to_the_template(name: str, chat: list[Message], reply: bool) -> bool:
    """Whether the forms cover the conversation; what they give is what the template gives."""
    forms = FORMS[name].forms
    assert forms is not None
    if any(token in str(message) for message in chat for token in SPECIALS):  # these are masked before they come here
        return False
    text = render_forms(forms, chat, add_generation_prompt=reply)
    if text is not None:
        assert text == SHAPING[name].render(chat, add_generation_prompt=reply)
    return text is not None


@given(st.sampled_from(sorted(REGULAR)), CHATS | CONVERSATIONS, st.booleans())
@settings(max_examples=600, deadline=None)
def test_forms_equal_the_template(name: str, chat: list[Message], reply: bool) -> None:
    held_to_the_template(name, chat, reply)


@pytest.mark.parametrize("name", REGULAR)
def test_forms_cover_an_ordinary_chat(name: str) -> None:
    turns: list[Message] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": " a\n"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    assert held_to_the_template(name, turns[:1], True)
    assert held_to_the_template(name, turns, True)
    assert held_to_the_template(name, turns[:2], False)
    system: Message = {"role": "system", "content": "d"}
    assert held_to_the_template(name, [system, *turns], True) == (name != "alternating")


def test_what_the_forms_do_not_cover_goes_to_the_template() -> None:
    text = Text(make_tokenizer("first"), ALTERNATING, FORMS["alternating"])
    with pytest.raises(TemplateError, match="no system message here"):
        text.prompt([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], 4)


def test_forms_survive_the_manifest() -> None:
    for made in FORMS.values():
        assert Strict().read(TextSettings, json_value(made), "text") == made


def test_with_forms_jinja2_is_not_imported() -> None:
    code = """
import json, sys
from tokenizers import Tokenizer
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.prompt.text import Text
from vtx.runtime.strict import Strict
tokenizer, template, settings = json.load(sys.stdin)
text = Text(Tokenizer.from_str(tokenizer), template, Strict().read(TextSettings, settings, "text"))
text.prompt([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what </s> is this?"}]}], 4)
print("jinja2" in sys.modules)
"""
    for made, expected in ((FORMS["vicuna"], "False"), (without_forms(FORMS["vicuna"]), "True")):
        values: list[Any] = [make_tokenizer("first").to_str(), VICUNA, json_value(made)]
        child = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(values), capture_output=True, text=True, check=True
        )
        assert child.stdout.strip() == expected


def without_forms(made: TextSettings) -> TextSettings:
    return dataclasses.replace(made, forms=None, no_forms="left out")
