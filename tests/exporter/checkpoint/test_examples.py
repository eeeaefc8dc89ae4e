"""Prompts are always transformers'; an export records some of them for libvtx."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError as JinjaError

from tests.support.fuzzing import EXAMPLES
from tests.support.templates import (
    BEYOND,
    FAMILIES,
    IRREGULAR,
    LONG_CHATS,
    REGULAR,
    long_chat,
    templates,
)  # fmt: skip
from tests.support.text import make_settings, make_tokenizer
from vtx.exporter.checkpoint.examples import with_examples
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.prompt.template import ShapingTemplate
from vtx.runtime.strict import Strict, json_value

SETTINGS = make_settings(make_tokenizer("first"))


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


def hold(template: str, chat: list[Message], reply: bool) -> None:
    """The prompt is transformers'."""
    try:
        prompt: str | None = ShapingTemplate(template, SETTINGS).render(chat, add_generation_prompt=reply)
    except TemplateError:
        prompt = None
    assert prompt == transformers_prompt(template, chat, reply)


@pytest.mark.parametrize("name", BEYOND)
def test_what_short_conversations_do_not_show_is_printed_as_transformers_prints_it(name: str) -> None:
    for turns in (1, 3, 4, 6):
        for images in (1, 3, 4):
            hold(BEYOND[name], long_chat(turns, images), True)
        hold(BEYOND[name], long_chat(turns, text="word " * 900), True)


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_the_families_give_transformers_prompts(name: str) -> None:
    if name != "strings":  # transformers leaves it to its caller to give such a template strings
        for turns in (1, 5):
            hold(FAMILIES[name], long_chat(turns, 4), True)
            hold(FAMILIES[name], [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                                  *long_chat(turns, 2)], True)  # fmt: skip


def check(template: str, chats: list[list[Message]], reply: bool) -> None:
    probe: list[Message] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "vtx"}]}]
    printed = transformers_prompt(template, probe, False) or ""
    assume(printed.count("<image>") == 1 and "vtx" in printed)  # else vtx takes it for one that reads strings
    for chat in chats:
        hold(template, chat, reply)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(templates(), st.lists(LONG_CHATS, min_size=6, max_size=6), st.booleans())
def test_prompts_of_any_template_are_those_of_transformers(
    template: str, chats: list[list[Message]], reply: bool
) -> None:
    check(template, chats, reply)


@pytest.mark.slow
@settings(max_examples=int(EXAMPLES or 60), deadline=None)
@given(templates(), st.lists(LONG_CHATS, min_size=10, max_size=10), st.booleans())
def test_prompts_of_many_templates_are_those_of_transformers(
    template: str, chats: list[list[Message]], reply: bool
) -> None:
    check(template, chats, reply)


@pytest.mark.sampled
@pytest.mark.parametrize("template", [*REGULAR.values(), *FAMILIES.values(), *IRREGULAR.values()])
def test_examples_are_the_template_s_prompts_and_survive_the_manifest(template: str) -> None:
    made = with_examples(SETTINGS, template)
    roles = {turn.role for example in made.examples for turn in example.turns}
    assert {"user", "assistant"} <= roles
    assert len(made.examples) >= 15
    assert Strict().read(TextSettings, json_value(made), "text") == made


def test_what_a_template_refuses_is_no_example() -> None:
    made = with_examples(SETTINGS, REGULAR["alternating"])
    assert not any(turn.role == "system" for example in made.examples for turn in example.turns)


def test_examples_of_a_template_with_a_date_are_of_one_day() -> None:
    made = with_examples(SETTINGS, IRREGULAR["a date"])
    assert all(example.text.startswith("03 February") for example in made.examples)
