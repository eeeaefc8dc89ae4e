"""The calls that applications make: options as keywords, stop strings, message lists, batches, an export."""

from __future__ import annotations

import base64
import io
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import vtx
from tests.support.bundles import export_with
from tests.support.exported import QUESTIONS, Models
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, combined
from vtx.runtime.api.writing import TextOutput
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.host.machine import cores
from vtx.runtime.prompt.messages import Message
from vtx.runtime.session.sampling import Sampling

OPTIONS = Options(max_new_tokens=12, ignore_eos=True)
IMAGE, OTHER = random_image(1), random_image(2, (40, 90))


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


# --- options --------------------------------------------------------------------------------------


def test_keywords_mean_the_fields_of_options_and_sampling() -> None:
    base = Options(max_new_tokens=5, sampling=Sampling(top_k=3))
    assert combined(base, {}) is base
    assert combined(base, {"temperature": 0.5, "stop": "x", "timeout": 2}) == Options(
        5, sampling=Sampling(0.5, top_k=3), stop=("x",), timeout=2
    )
    assert combined(None, {"sampling": Sampling(seed=1), "top_p": 0.5}).sampling == Sampling(top_p=0.5, seed=1)


def test_keywords_answer_as_options_do(model: Model) -> None:
    with model.open(IMAGE) as image:
        wanted = image.ask(QUESTIONS[1], 3, Options(7, True, Sampling(1.5, seed=4)))
        found = image.ask(QUESTIONS[1], 3, max_new_tokens=7, ignore_eos=True, temperature=1.5, seed=4)
        chat = image.chat(3).ask(QUESTIONS[1], max_new_tokens=7, ignore_eos=True, temperature=1.5, seed=4)
    assert wanted.token_ids == found.token_ids == chat.token_ids
    assert len(model.ask("Who are you?", max_new_tokens=3, ignore_eos=True).token_ids) == 3


HUGE = 10**900


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number of at least 1"),
        ({"max_new_tokens": 0}, "must be at least 1"),
        ({"max_new_tokens": True}, "whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5'"),
        ({"max_new_tokens": HUGE}, "a number of 2990 bits"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number of at least 0"),
        ({"seed": 10**5000}, "seed is a number of 16610 bits"),
        ({"top_k": 1.0}, "top-k is 1.0"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be 0 (greedy) or a positive number"),
        ({"temperature": HUGE}, "temperature"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": "1"}, "top-p"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"gate_threshold": 2}, "a probability from 0 to 1"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"logprobs": 5}, "logprobs"),
        ({"sampling": 3}, "vtx.Sampling"),
        ({"sampling": 3, "top_k": 1}, "vtx.Sampling"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "2s"}, "timeout is '2s'"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"stop": ""}, "none of them empty"),
        ({"stop": [1]}, "stop is [1]"),
        ({"stop": ["x"] * 17}, "17 strings; at most 16"),
        ({"max_tokens": 3}, "there is no option 'max_tokens'; did you mean max_new_tokens? help(vtx.Options)"),
        ({"options": 5}, "options is 5; it must be a vtx.Options"),
        ({"reduce": 5}, "reduce is 5; it must be a spec"),
        ({"reduce": ["fastv"]}, "reduce is ['fastv']"),
        ({"reduce": "fastv:k=" + "9" * 900}, "give a whole number"),
        ({"reduce": "fastv:k=" + "9" * 300}, "give a whole number"),
        ({"k": 2.5}, "K is 2.5"),
        ({"question": 5}, "string"),
        ({"question": None}, "string"),
    ],
)
def test_a_wrong_value_is_one_line(model: Model, keywords: dict[str, Any], message: str) -> None:
    with model.open(IMAGE) as image, pytest.raises(RequestError) as raised:
        image.ask(**{"question": "red?", **keywords})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 250


def test_numbers_of_numpy_are_numbers() -> None:
    options = Options(np.int64(5), timeout=np.float32(2), sampling=Sampling(np.float32(0.5), seed=np.int32(3)))  # type: ignore[arg-type]
    assert options.max_new_tokens == 5


# --- the text of an answer ------------------------------------------------------------------------


class Pieces:
    """A detokenizer whose tokens are the numbers of given pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, id: int) -> str:
        return self._pieces[id]

    def finish(self) -> str:
        return ""


def shown(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    output = TextOutput(Pieces(pieces), stops)  # type: ignore[arg-type]
    texts = []
    for token in range(len(pieces)):
        texts.append(output.push(token))
        if output.stopped:
            break
    else:
        texts.append(output.push(None))
    assert output.text == "".join(texts)
    return texts, output.stopped


def cut(text: str, stops: tuple[str, ...]) -> str:
    """`text` up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


LETTERS = st.text("ab ", max_size=4)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3).map(tuple))
def test_a_stop_string_ends_the_text_wherever_token_boundaries_are(pieces: list[str], stops: tuple[str, ...]) -> None:
    texts, stopped = shown(pieces, stops)
    whole = "".join(pieces).lstrip()
    assert "".join(texts) == cut(whole, stops)
    assert stopped == any(stop in whole for stop in stops)


def test_text_that_cannot_belong_to_a_stop_string_is_shown_at_once() -> None:
    assert shown(["Hel", "lo ", "STO", "RE"], ("STOP",)) == (["Hel", "lo ", "", "STORE", ""], False)


def test_an_answer_stops_at_a_string_and_the_next_is_a_fresh_one(model: Model) -> None:
    with model.open(IMAGE) as image:
        whole = image.ask(QUESTIONS[1], 3, OPTIONS)
        stop = whole.text[len(whole.text) // 2 :][:3]
        stream = image.stream(QUESTIONS[1], 3, OPTIONS, stop=stop)
        pieces = list(stream)
        assert stream.answer.text == "".join(pieces) == whole.text.split(stop)[0]
        assert stream.answer.stopped == "stop"
        assert stream.answer.token_ids == whole.token_ids[: len(stream.answer.token_ids)]
        assert len(stream.answer.token_ids) < len(whole.token_ids)
        assert image.ask(QUESTIONS[1], 3, OPTIONS).token_ids == whole.token_ids


def test_an_answer_says_whether_its_limit_or_the_context_ended_it(model: Model) -> None:
    conversation, question = model.open(IMAGE), "?" * 200
    whole = conversation.ask(question, max_new_tokens=1000, ignore_eos=True)
    room = len(whole.token_ids)
    assert (whole.stopped, 1 < room < 100) == ("context", True)
    for limit, stopped in ((room - 1, "length"), (room, "length"), (room + 1, "context")):
        answer = conversation.ask(question, max_new_tokens=limit, ignore_eos=True)
        assert (answer.token_ids, answer.stopped) == (whole.token_ids[:limit], stopped)


def test_log_probabilities_are_those_of_the_logits(model: Model) -> None:
    with model.open(IMAGE) as image:
        assert image.ask(QUESTIONS[1], 3, OPTIONS).logprobs is None
        answer = image.ask(QUESTIONS[1], 3, OPTIONS, logprobs=True)
        drawn = image.ask(QUESTIONS[1], 3, OPTIONS, logprobs=True, temperature=5.0, seed=2)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert drawn.logprobs is not None
    assert all(value < 0 for value in answer.logprobs)
    assert drawn.token_ids[0] != answer.token_ids[0]
    assert drawn.logprobs[0] < answer.logprobs[0]
    assert answer.to_dict()["logprobs"] == answer.logprobs


def test_a_repetition_penalty_changes_the_answer_as_it_counts_prompt_and_answer(model: Model) -> None:
    with model.open(IMAGE) as image:
        plain = image.ask(QUESTIONS[1], 3, OPTIONS)
        penalised = image.ask(QUESTIONS[1], 3, OPTIONS, repetition_penalty=1000)
    assert len(set(penalised.token_ids)) == len(penalised.token_ids)
    assert penalised.token_ids != plain.token_ids


# --- system prompts and message lists -------------------------------------------------------------


def test_a_system_prompt_stands_before_every_question(model: Model) -> None:
    with model.open(IMAGE, system="Answer in one word.") as image:
        answer = image.ask(QUESTIONS[1], 3, OPTIONS)
        turn = image.chat(3).ask(QUESTIONS[1], OPTIONS)
    parts = [{"type": "image", "image": IMAGE}, {"type": "text", "text": QUESTIONS[1]}]
    messages = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": parts}]
    wanted = model.generate(messages, 3, OPTIONS)
    assert answer.token_ids == turn.token_ids == wanted.token_ids
    assert answer.stats.prompt_tokens > model.open(IMAGE).ask(QUESTIONS[1], 3, OPTIONS).stats.prompt_tokens
    assert turn.stats.reused_image


@pytest.mark.slow
def test_a_template_without_a_place_for_a_system_prompt_is_named(tiny_checkpoint: Any, tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m['role'] == 'user' %}{% for part in m['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
    )
    options = ExportOptions(str(tiny_checkpoint()), (3,), "fp32", template=template)
    model = load(export_with(options, tmp_path / "bundle").folder, device="cpu", threads=1)
    assert model.open(IMAGE).ask(QUESTIONS[1], 3, OPTIONS).token_ids
    with pytest.raises(RequestError, match="no place for a system prompt"):
        model.open(IMAGE, system="Answer in one word.")


@pytest.fixture(params=["hf-pil", "hf-path", "openai-data-url", "openai-path", "bytes", "base64", "array", "file-url"])
def part(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """IMAGE in each of the forms in which message lists hold images."""
    path = tmp_path / "an image.png"
    IMAGE.save(path)
    encoded = base64.b64encode(png(IMAGE)).decode()
    forms: dict[str, dict[str, Any]] = {
        "hf-pil": {"type": "image", "image": IMAGE},
        "hf-path": {"type": "image", "path": str(path)},
        "openai-data-url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        "openai-path": {"type": "image_url", "image_url": str(path)},
        "bytes": {"type": "image", "image": png(IMAGE)},
        "base64": {"type": "image", "base64": encoded},
        "array": {"type": "image", "image": np.asarray(IMAGE)},
        "file-url": {"type": "image", "url": path.as_uri()},
    }
    return forms[request.param]


def test_a_message_list_answers_as_the_opened_image_does(model: Model, part: dict[str, Any]) -> None:
    wanted = model.open(IMAGE).ask(QUESTIONS[1], 3, OPTIONS)
    content = [part, {"type": "text", "text": QUESTIONS[1]}]
    stream = model.stream([{"role": "user", "content": content}], 3, OPTIONS)
    assert "".join(stream) == wanted.text
    assert stream.answer.token_ids == wanted.token_ids


def test_a_message_list_with_turns_answers_as_a_chat_does(model: Model) -> None:
    chat = model.open(IMAGE).chat(3)
    first, second = chat.ask(QUESTIONS[1], OPTIONS), chat.ask(QUESTIONS[0], OPTIONS)
    messages = [
        {"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": QUESTIONS[1]}]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": QUESTIONS[0]},
    ]
    assert model.generate(messages, 3, OPTIONS).token_ids == second.token_ids


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("What?", "must be a list of dicts"),
        ([], "must be the user's question"),
        ([{"role": "assistant", "content": "hello"}], "must be the user's question"),
        (["What?"], "a dict with role and content"),
        ([{"role": "user"}], "not NoneType"),
        ([{"role": "user", "content": [{"type": "video"}]}], "a part of a message must be"),
        ([{"role": "user", "content": ["What?"]}], "a part of a message must be"),
        ([{"role": "user", "content": [{"type": "image"}]}], "names no image"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.y/z.jpg"}}]}], "fetch it"),
        ([{"role": "user", "content": [{"type": "image", "base64": "!"}]}], "cannot be decoded"),
    ],
)
def test_a_message_list_of_another_form_is_refused(model: Model, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate(messages)


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_answers_in_order_as_single_questions_do(model: Model) -> None:
    items = [(random_image(seed), QUESTIONS[seed % 3]) for seed in range(7)]
    answers = list(model.batch(items, 3, OPTIONS, threads=3))
    assert [a.token_ids for a in answers] == [model.open(i).ask(q, 3, OPTIONS).token_ids for i, q in items]


def test_a_batch_takes_items_as_it_needs_them_and_can_be_left(model: Model) -> None:
    taken = []

    def items() -> Iterator[tuple[Image.Image, str]]:
        for number in range(1000):
            taken.append(number)
            yield IMAGE, QUESTIONS[0]

    before = threading.active_count()
    for _ in model.batch(items(), 3, OPTIONS):
        break
    assert len(taken) <= 4
    assert threading.active_count() == before


def test_the_first_error_ends_a_batch_at_its_place(model: Model) -> None:
    batch = model.batch([(IMAGE, QUESTIONS[0]), (b"no image", QUESTIONS[0]), (IMAGE, QUESTIONS[0])], 3, OPTIONS)
    assert next(batch).token_ids
    with pytest.raises(ImageError):
        next(batch)


@pytest.mark.parametrize("threads", [0, 1.5, "2", 1025])
def test_threads_of_a_batch_are_checked_before_it_begins(model: Model, threads: Any) -> None:
    with pytest.raises(RequestError, match="threads"):
        model.batch([], threads=threads)


# --- an export, a load, and what they print -------------------------------------------------------


@pytest.mark.slow
def test_an_export_from_python_is_loaded_and_closed(
    tiny_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "vtx")
    phases = set()
    bundle = vtx.export(
        str(tiny_checkpoint()), tmp_path / "bundle", k=3, precision="fp32", reduce="fastv:k=3",
        progress=lambda phase, done, total: phases.add(phase),
    )  # fmt: skip
    assert repr(bundle).endswith("/bundle: " + bundle.manifest.model.name + ", fp32 weights, K 3>")
    assert phases
    with vtx.load(bundle.folder, device="cpu", threads=1) as model:
        assert model.open(IMAGE).ask(QUESTIONS[0], 3, OPTIONS).token_ids
        assert "K 3" in repr(model)
    assert [r.name for r in caplog.records if "loaded" in r.message] == ["vtx.runtime.api.load"]
    assert any("closed" in r.message for r in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_threads_are_at_most_one_a_core_and_more_are_told(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    most = cores()
    with vtx.load(model.bundle.folder, device="cpu", threads=1000) as loaded:
        backend: Any = loaded.loaded.backend
        assert backend.threads == most
    assert f"1000 threads are more than the {most} cores" in caplog.text


@pytest.mark.parametrize("threads", [0, 2.5, "4", True, 1025])
def test_threads_of_a_load_are_checked(model: Model, threads: Any) -> None:
    with pytest.raises(RequestError, match="threads"):
        vtx.load(model.bundle.folder, threads=threads)


def test_what_is_printed_of_answers_helps(model: Model) -> None:
    with model.open([IMAGE, OTHER]) as both:
        answer = both.ask(QUESTIONS[1], 3, OPTIONS)
        assert str(answer) == answer.text
        assert repr(answer).startswith(f"Answer(text={answer.text!r}, token_ids=")
        assert "kv_slots" not in repr(answer)
        assert "K 3" in str(answer.stats)
        assert "first token after" in str(answer.stats)
        assert repr(both).startswith("<vtx.Conversation about 2 images with ")
        assert "0 turns" in repr(both.chat())


def test_messages_of_a_chat_can_be_given_back(model: Model) -> None:
    chat = model.open(IMAGE).chat(3)
    chat.ask(QUESTIONS[1], OPTIONS)
    messages: list[Message] = chat.messages
    assert [m["role"] for m in messages] == ["user", "assistant"]
