"""Thoughts: where they begin and end in an answer, whatever its tokens, and the switch in the chat template."""

from __future__ import annotations

import importlib
from itertools import combinations, pairwise
from typing import Any

import pytest

from tests.support.calling import CHANNEL, HERMES, SWITCHED, THINKING, switched_template
from tests.support.text import VICUNA, make_settings, make_tokenizer
from vtx.runtime.api.writing import TextOutput
from vtx.runtime.prompt.messages import Message, with_tools
from vtx.runtime.prompt.template import ShapingTemplate
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.thoughts import FORMS, ThoughtDivider, thought_form

QWEN, GEMMA = FORMS
ASKED: list[Message] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}]}]


def divided(divider: ThoughtDivider, pieces: list[str]) -> tuple[str | None, str]:
    """The thought and the answer of a text that comes in pieces; what was given out is never taken back."""
    answer = ""
    thought = ""
    for piece in pieces:
        answer += divider.push(piece)
        assert (divider.thought or "").startswith(thought)
        thought = divider.thought or ""
    return divider.thought, answer + divider.push("", last=True)


@pytest.mark.parametrize(
    ("form", "inside", "text", "want"),
    [
        (QWEN, True, "\nLook.\n</think>\n\nRed.", ("Look.", "\n\nRed.")),
        (QWEN, True, "a < b </ c", ("a < b </ c", "")),
        (QWEN, True, "</think>Red.", ("", "Red.")),
        (QWEN, False, "<think>\nLook. </think>Red.", ("Look.", "Red.")),
        (QWEN, False, "<thin> is no mark", (None, "<thin> is no mark")),
        (QWEN, False, "Red </think> blue", (None, "Red </think> blue")),
        (GEMMA, False, "<|channel>thought\nLook.<channel|>Red.", ("Look.", "Red.")),
        (GEMMA, False, "<|channel>final\nRed.", (None, "final\nRed.")),
    ],
)
def test_a_text_is_divided_alike_wherever_it_is_cut(
    form: Any, inside: bool, text: str, want: tuple[str | None, str]
) -> None:
    for cuts in [(), *combinations(range(1, len(text)), 2)]:
        ends = [0, *cuts, len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        assert divided(ThoughtDivider(form, ["<|channel>"], inside=inside), pieces) == want, pieces


def text_of(template: str, *special: str) -> Text:
    tokenizer = make_tokenizer("first")
    tokenizer.add_special_tokens(list(special))
    return Text(tokenizer, template, make_settings(tokenizer))


def shown(text: Text, answer: str, *, thinking: bool | None, stops: tuple[str, ...] = ()) -> tuple[str | None, str]:
    """The thought and the text of an answer, token by token."""
    messages = with_tools(ASKED, [], thinking)
    divider = text.thoughts(messages, text.prompt(messages, 1))
    assert divider is not None
    output = TextOutput(text.stream(marks=True), stops, (), divider)
    for id in [*text.tokenizer.encode(answer, add_special_tokens=False).ids, None]:
        output.push(id)
        if output.stopped:
            break
    return divider.thought, output.text


def test_marks_may_be_special_tokens_or_text() -> None:
    gemma = text_of(CHANNEL, "<|channel>", "<channel|>")
    answer = "<|channel>thought\nis this a cat<channel|>a cat"
    assert len(gemma.tokenizer.encode("<channel|>", add_special_tokens=False).ids) == 1
    assert shown(gemma, answer, thinking=True) == ("is this a cat", "a cat")
    assert shown(text_of(CHANNEL), answer, thinking=True) == ("is this a cat", "a cat")
    assert shown(gemma, "a <|channel>cat", thinking=True) == (None, gemma.decode(
        gemma.tokenizer.encode("a <|channel>cat", add_special_tokens=False).ids
    ))  # fmt: skip
    assert shown(text_of(THINKING), "a cat </think> a cat", thinking=True) == ("a cat", "a cat")
    assert shown(text_of(THINKING), "a cat </think> a cat", thinking=False) == (None, "a cat </think> a cat")


def test_stop_strings_are_looked_for_behind_the_thought() -> None:
    answer = "this is a cat </think> the cat is this"
    assert shown(text_of(THINKING), answer, thinking=True, stops=("cat",)) == ("this is a cat", "the ")


def test_an_answer_that_is_begun_and_a_whole_prompt_have_no_thought_of_their_own() -> None:
    text = text_of(THINKING)
    begun: list[Message] = [*ASKED, {"role": "assistant", "content": "a cat"}]
    assert text.thoughts(begun, text.asked(begun, 1)) is None
    prompt: list[Message] = [{"role": "prompt", "content": "a <think>"}]
    assert text.thoughts(prompt, text.asked(prompt, 1)) is None
    plain = text_of(VICUNA)
    assert plain.thoughts(ASKED, plain.prompt(ASKED, 1)) is None


def test_forms_are_those_of_the_template() -> None:
    assert [thought_form(template) for template in (THINKING, CHANNEL, HERMES)] == [QWEN, GEMMA, None]


def by_transformers(source: str, **variables: Any) -> str:
    transformers: Any = importlib.import_module("transformers.utils.chat_template_utils")
    rendered, _ = transformers.render_jinja_template(
        [ASKED], chat_template=source, add_generation_prompt=True, bos_token="<s>", **variables
    )
    return str(rendered[0])


@pytest.mark.parametrize("name", SWITCHED)
def test_prompts_with_and_without_thoughts_are_those_of_transformers(name: str) -> None:
    source, token = switched_template(name)
    template = ShapingTemplate(source, make_settings(make_tokenizer("first"), image_token=token))
    assert template.switches_thinking
    assert thought_form(source) is not None
    prompts = {}
    for value in (True, False, None):
        given = {} if value is None else {"enable_thinking": value}
        prompts[value] = template.render(with_tools(ASKED, [], value), add_generation_prompt=True)
        assert prompts[value] == by_transformers(source, **given)
    assert prompts[True] != prompts[False]
