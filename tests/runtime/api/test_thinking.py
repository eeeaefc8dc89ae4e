"""Thoughts of answers: apart from the text, within their own limit, switched by request, refused where none are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.calling import CHANNEL, THINKING, Scripted, calling_bundle
from tests.support.exported import Models
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api import answering
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.errors import RequestError

ANSWER = "\nIt is red.\n</think>\n\nRed, I think."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with load(calling_bundle(tmp_path_factory.mktemp("thinking"), THINKING), device="cpu", threads=1) as model:
        yield model


@pytest.fixture
def script(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """`script(text)`: answers begin with the tokens of this text, which are returned."""

    def written(text: str) -> list[int]:
        ids: list[int] = model.loaded.text.tokenizer.encode(text, add_special_tokens=False).ids
        monkeypatch.setattr(answering, "Sampler", lambda *_: Scripted(ids))
        return ids

    return written


def test_the_thought_is_apart_from_the_answer(model: Model, script: Callable[[str], list[int]]) -> None:
    ids = script(ANSWER)
    thought = script(ANSWER.partition("</think>")[0] + "</think>")
    script(ANSWER)
    assert len(ids) > len(thought) > len("</think>")
    with model.open(random_image(1)) as image:
        stream = image.stream("red?", thinking=True, max_new_tokens=len(ids), k="none")
        pieces = list(stream)
        answer = stream.answer
        assert (answer.thought, answer.text, "".join(pieces)) == ("It is red.", "Red, I think.", "Red, I think.")
        assert answer.token_ids == tuple(ids)
        assert answer.thought_tokens == len(thought)
        assert stream.thought == answer.thought
        assert {"thought": "It is red.", "thought_tokens": len(thought)}.items() <= answer.to_dict().items()
        plain = image.ask("red?", thinking=False, max_new_tokens=len(ids), k="none")
        assert (plain.thought, plain.text) == (None, ANSWER.lstrip())
        assert "thought" not in plain.to_dict()


def test_a_limit_ends_the_thought_with_its_mark(model: Model, script: Callable[[str], list[int]]) -> None:
    mark: list[int] = model.loaded.text.tokenizer.encode("</think>", add_special_tokens=False).ids
    assert len(mark) > 1
    ids = script("I wonder and wonder.")
    for limit in (1, 5, 50):
        script("I wonder and wonder.")
        limited: dict[str, Any] = {"max_thinking_tokens": limit, "max_new_tokens": 80, "ignore_eos": True}
        with model.open(random_image(1)) as image:
            answer = image.ask("red?", thinking=True, prompt_lookup=3 if limit == 1 else 0, **limited)
        assert answer.token_ids[limit : limit + len(mark)] == tuple(mark)
        assert answer.thought_tokens == limit + len(mark)
        if limit < len(ids):
            written = model.loaded.text.decode(ids[:limit])
            assert answer.thought == written.strip()
            # what follows is not forced: the rest of the script
            assert answer.token_ids[limit + len(mark) :][: len(ids) - limit] == tuple(ids[limit:])


def test_a_form_is_held_to_behind_the_thought(model: Model, script: Callable[[str], list[int]]) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    script("A form? </think>")
    with model.open(random_image(1)) as image:
        answer = image.ask("red?", thinking=True, regex="(red|blue) [0-9]{3}", max_new_tokens=60)
        assert answer.thought == "A form?"
        assert answer.text[:-4] in ("red", "blue")
        assert not answer.incomplete
        with pytest.raises(RequestError, match="choices are scored right behind the prompt"):
            image.ask("red?", thinking=True, choices=("red", "blue"))
        script("")
        assert image.ask("red?", thinking=False, choices=("red", "blue")).text in ("red", "blue")


def test_a_chat_goes_on_without_the_thoughts_of_its_turns(model: Model, script: Callable[[str], list[int]]) -> None:
    ids = script(ANSWER)
    with model.open(random_image(1)) as image:
        chat = image.chat("none")
        chat.ask("red?", thinking=True, max_new_tokens=len(ids))
        assert [part["text"] for part in chat.messages[-1]["content"]] == ["Red, I think."]  # type: ignore[typeddict-item,index]
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]
        script(ANSWER)
        assert chat.ask("sure?", thinking=True, max_new_tokens=len(ids)).thought == "It is red."


def test_thoughts_are_refused_where_there_are_none(models: Models, model: Model) -> None:
    plain = models(Tiny())
    with plain.open() as conversation:
        with pytest.raises(RequestError, match="no switch for thoughts"):
            conversation.ask("red?", thinking=True)
        with pytest.raises(RequestError, match="no marks of thoughts"):
            conversation.ask("red?", max_thinking_tokens=4)
        assert conversation.ask("red?", thinking=False, max_new_tokens=2).thought is None
    with model.open() as conversation:
        for values in ({"thinking": 1}, {"max_thinking_tokens": 0}):
            with pytest.raises(RequestError, match=next(iter(values))):
                conversation.ask("red?", **values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_model_that_begins_its_thoughts_itself_is_held_to_no_form_with_them(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    with load(calling_bundle(tmp_path_factory.mktemp("channel"), CHANNEL), device="cpu", threads=1) as model:
        ids = model.loaded.text.tokenizer.encode("<|channel>thought\nA cat.<channel|>It is.").ids
        monkeypatch.setattr(answering, "Sampler", lambda *_: Scripted(ids))
        answer = model.ask("red?", thinking=True, max_new_tokens=len(ids))
        assert (answer.thought, answer.text) == ("A cat.", "It is.")
        with pytest.raises(RequestError, match="begins its thoughts itself"):
            model.ask("red?", thinking=True, regex="a")
