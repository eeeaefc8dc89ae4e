"""`about`: image tokens are chosen by a text of its own, in place of the question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.exported import Models
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.cli import run
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.prompt.messages import Message, Part, asked_text, asking_about
from vtx.tools.evaluation.ask import Asker, make_methods
from vtx.tools.evaluation.questions import TaskQuestion

NOUN, LONG = "the dog", "What is the colour of the square in the picture? " * 4
SPECS = ("cdpruner:keep=9", "dart:keep=40,k=0,text_pivots=30")
INSTRUCTION = "Answer the question using a single word or phrase."


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(image=126, context=768), (3,), "fp32", ("none", *SPECS))


@pytest.fixture
def conversation(model: Model) -> Conversation:
    return model.open(random_image(4))


def kept(answer: Any) -> Any:
    assert answer.stats.reduced is not None
    return answer.stats.reduced.kept


@pytest.mark.parametrize("spec", SPECS)
def test_tokens_are_those_that_the_text_alone_would_choose(conversation: Conversation, spec: str) -> None:
    own, noun = (kept(conversation.ask(text, reduce=spec, max_new_tokens=1)) for text in (LONG, NOUN))
    assert own != noun, "both texts choose alike and prove nothing"
    asked = conversation.ask(LONG, reduce=spec, about=NOUN, max_new_tokens=1)
    assert kept(asked) == noun
    assert asked.stats.prompt_tokens == conversation.ask(LONG, reduce=spec, max_new_tokens=1).stats.prompt_tokens
    for question in ("how many?", LONG):  # another question about the same noun reuses the image
        again = conversation.ask(question, reduce=spec, about=NOUN, max_new_tokens=1)
        assert kept(again) == noun
    assert again.stats.reused_image


def test_a_chat_keeps_the_text_of_its_first_turn(conversation: Conversation) -> None:
    spec = SPECS[0]
    wanted = kept(conversation.ask(NOUN, reduce=spec, max_new_tokens=1))
    chat = conversation.chat(reduce=spec)
    turns = [chat.ask(LONG, max_new_tokens=2, about=NOUN), chat.ask("how many?", max_new_tokens=2)]
    assert [kept(turn) for turn in turns] == [wanted] * 2
    assert turns[1].stats.reused_layers == conversation.loaded.manifest.model.layers
    with pytest.raises(RequestError, match=r"about is the first turn's"):
        chat.ask("red?", about="red")


@pytest.mark.parametrize("text", ["大きい犬", "собака", "🙂", "</s> <image>", "word " * 50])
def test_any_script_and_special_tokens_are_text(conversation: Conversation, text: str) -> None:
    wanted = kept(conversation.ask(text, reduce=SPECS[0], max_new_tokens=1))
    assert kept(conversation.ask("red?", reduce=SPECS[0], about=text, max_new_tokens=1)) == wanted


@pytest.mark.parametrize(
    ("about", "reduce", "message"),
    [
        ("", SPECS[0], "about is empty; give the text by which image tokens are chosen, or leave it out"),
        (" \n", SPECS[0], "about is empty"),
        (7, SPECS[0], "about is 7; it must be a string"),
        ("x" * 10_001, SPECS[0], "about has 10,001 characters, the limit is 10,000; shorten it"),
        ("a \ud800", SPECS[0], "half of a surrogate pair"),
        (NOUN, "none", "reduce=none chooses none by a text; use cdpruner, or leave about out"),
        (NOUN, "cdpruner:text=none", "text=none chooses none by a text"),
        (NOUN, "random+cdpruner:text=none", "chooses none by a text"),
    ],
)
def test_what_is_no_text_and_what_reads_none_is_refused(
    conversation: Conversation, about: Any, reduce: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message.replace("+", r"\+")):
        conversation.ask("red?", reduce=reduce, about=about, max_new_tokens=1)


def test_10_000_characters_choose_tokens_or_are_refused_by_the_context(conversation: Conversation) -> None:
    with pytest.raises(ContextError, match=r"with about in place of the question, the prompt has 10,0\d\d characters"):
        conversation.ask("red?", reduce=SPECS[0], about="x" * 10_000, max_new_tokens=1)


def test_pictures_stay_where_they_are_in_the_message() -> None:
    [message] = asking_about(prompt_messages("a long question", 2), NOUN)
    pictures = [part["type"] for part in prompt_messages("a long question", 2)[0]["content"]]  # type: ignore[index]
    assert [part["type"] for part in message["content"]] == pictures  # type: ignore[index]
    text: Part = {"type": "text", "text": "a"}
    around: list[Message] = [{"role": "user", "content": [text, {"type": "image"}, text]}]
    assert asking_about(around, NOUN)[0]["content"] == [{"type": "text", "text": NOUN}, {"type": "image"}]
    turns = [*prompt_messages("one?"), {"role": "assistant", "content": "1"}, {"role": "user", "content": "two?"}]
    assert asked_text(asking_about(turns, NOUN)) == NOUN  # type: ignore[arg-type]
    assert len(asking_about(turns, NOUN)) == 1  # type: ignore[arg-type]
    assert asking_about([{"role": "user", "content": "no picture"}], NOUN) == [
        {"role": "user", "content": "no picture"}
    ]


def test_vtx_run_takes_it(model: Model, conversation: Conversation, tmp_path: Path) -> None:
    random_image(4).save(tmp_path / "a.png")
    words = [
        "--bundle",
        str(model.bundle.folder),
        str(tmp_path / "a.png"),
        LONG,
        "--reduce",
        SPECS[0],
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(run, [*words, "--about", NOUN, "--json", "--max-new-tokens", "1"], catch_exceptions=False)
    found = json.loads(done.stdout)["kept"][0]["patches"]
    assert found == [
        [*patches] for patches in kept(conversation.ask(NOUN, reduce=SPECS[0], max_new_tokens=1))[0].patches
    ]


def test_vtx_eval_leaves_the_instruction_out_of_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_image(4).save(tmp_path / "a.png")
    given, ask = list[Any](), Conversation.ask
    monkeypatch.setattr(Conversation, "ask", lambda *a, **b: (given.append((a[1], a[3].about)), ask(*a, **b))[1])
    question = TaskQuestion((tmp_path / "a.png",), f"red?\n{INSTRUCTION}", ("yes",), "a", about="red?")
    Asker(model, Options(max_new_tokens=1))(question, make_methods((None,), ("none", SPECS[0], "random")), 0)
    assert [about for _, about in given] == [None, "red?", None]
    assert {text for text, _ in given} == {question.text}
