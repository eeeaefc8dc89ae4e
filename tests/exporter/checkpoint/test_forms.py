"""Prompt forms say what the template says, or are not there."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.templates import ALTERNATING, CHATS, CONVERSATIONS, IRREGULAR, REGULAR, resolved
from tests.support.text import SPECIALS, VICUNA, make_tokenizer
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.prompt.rendering import render_forms
from vtx.runtime.prompt.shaping import ShapingTemplate
from vtx.runtime.prompt.text import Text
from vtx.runtime.strict import Strict, json_value


@cache
def forms(name: str) -> TextSettings:
    return resolved(REGULAR[name])


@cache
def shaping(name: str) -> ShapingTemplate:
    return ShapingTemplate(REGULAR[name], forms(name))


@pytest.mark.parametrize("name", REGULAR)
def test_regular_templates_have_forms(name: str) -> None:
    assert forms(name).no_forms is None
    assert forms(name).forms is not None


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


def held_to_the_template(name: str, chat: list[Message], reply: bool) -> bool:
    """Whether the forms cover the conversation; what they give is what the template gives."""
    made = forms(name).forms
    assert made is not None
    if any(token in str(message) for message in chat for token in SPECIALS):  # these are masked before they come here
        return False
    text = render_forms(made, chat, add_generation_prompt=reply)
    if text is not None:
        assert text == shaping(name).render(chat, add_generation_prompt=reply)
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
    text = Text(make_tokenizer("first"), ALTERNATING, forms("alternating"))
    with pytest.raises(TemplateError, match="no system message here"):
        text.prompt([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], 4)


def test_forms_survive_the_manifest() -> None:
    for made in map(forms, REGULAR):
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
    for made, expected in ((forms("vicuna"), "False"), (without_forms(forms("vicuna")), "True")):
        values: list[Any] = [make_tokenizer("first").to_str(), VICUNA, json_value(made)]
        child = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(values), capture_output=True, text=True, check=True
        )
        assert child.stdout.strip() == expected


def without_forms(made: TextSettings) -> TextSettings:
    return dataclasses.replace(made, forms=None, no_forms="left out")
