"""Answer, then fill in: each field is what a chat gives that asks for it as a choice, and the form is always valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from tests.support.exported import Models
from tests.support.serving import serving, user
from tests.support.tiny import Tiny, random_image
from vtx.cli import run
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.filling import FillingStream, read_form
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import Guide

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
QUESTION = "Describe the shapes."
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {**COUNT, "description": "How many shapes are there?"},
        "is_red": {"type": "boolean"},
        "shape": {"enum": ["circle", "square", None]},
        "version": {"const": 3},
        "size": {"type": "number", "minimum": 0, "maximum": 1.5},
        "note": {"type": "string"},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["count"], "additionalProperties": False, "$defs": {"place": {"enum": ["left", "right"]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(context=1024, kv_heads=4), ks=(3,))


@pytest.fixture
def image(model: Model) -> Iterator[Conversation]:
    with model.open(random_image(1)) as conversation:
        yield conversation


def test_fields_are_those_of_a_chat_that_asks_for_each(model: Model, image: Conversation) -> None:
    answer = image.ask(QUESTION, schema=FORM, fill=True, max_new_tokens=24)
    assert answer.fields is not None
    assert answer.free_text == image.ask(QUESTION, max_new_tokens=24).text
    values = json.loads(answer.text)
    jsonschema.validate(values, FORM)
    assert {name: field.value for name, field in answer.fields.items()} == values
    assert list(values) == list(FORM["properties"])
    closed: list[tuple[str, str, dict[str, Any]]] = [
        ("count", "How many shapes are there?", {str(n): n for n in range(10)}),
        ("is_red", "What is the is red?", {"yes": True, "no": False}),
        ("shape", "What is the shape?", {"circle": "circle", "square": "square", "null": None}),
    ]
    for name, question, texts in closed:
        chat = image.chat()
        chat.ask(QUESTION, max_new_tokens=24)
        asked = chat.ask(question, choices=list(texts))
        assert asked.choices is not None
        assert values[name] == texts[asked.text]
        assert answer.fields[name].probability == pytest.approx(asked.choices[asked.text], rel=1e-3)
        assert answer.fields[name].mass == pytest.approx(asked.choices_mass, rel=1e-3)
    assert (values["version"], answer.fields["version"].probability) == (3, 1.0)
    assert all(0 < field.probability <= 1 for field in answer.fields.values())
    assert answer.to_dict()["fields"]["count"]["value"] == values["count"]


def test_the_image_is_run_once_for_the_whole_form(image: Conversation) -> None:
    streams, stream_messages = list[Any](), image.stream_messages

    def listed(*arguments: Any, **keywords: Any) -> Any:
        streams.append(stream_messages(*arguments, **keywords))
        return streams[-1]

    filling = FillingStream(
        listed, image.opening(QUESTION), Settings(options=Options(8, guide=Guide(schema=FORM, fill=True)))
    )
    filling.read()
    free, *fields = (stream.answer.stats for stream in streams)
    assert not free.reused_image
    assert len(fields) >= 6
    assert all(stats.reused_image and stats.reused_tokens > free.vision_tokens for stats in fields)


def test_a_field_alone_is_the_question_again(image: Conversation) -> None:
    one = {"type": "object", "properties": {"answer": COUNT}}
    [field] = read_form(one, QUESTION)
    assert field.question == QUESTION
    chat = image.chat()
    chat.ask(QUESTION, max_new_tokens=8)
    asked = chat.ask(QUESTION, choices=[str(n) for n in range(10)])
    answer = image.ask(QUESTION, schema=one, fill=True, max_new_tokens=8)
    assert json.loads(answer.text) == {"answer": int(asked.text)}


def test_what_is_cut_or_cancelled_is_incomplete(image: Conversation) -> None:
    form = {"type": "object", "properties": {"count": COUNT, "name": {"type": "string", "minLength": 40}}}
    cut = image.ask(QUESTION, schema=form, fill=True, max_new_tokens=6)
    assert (cut.stopped, cut.incomplete) == ("length", True)
    assert list(json.loads(cut.text)) == ["count"]
    stream = image.stream(QUESTION, schema=FORM, fill=True)
    for _ in range(3):
        stream.step()
    stream.cancel()
    assert stream.answer.stopped == "cancelled"
    assert stream.answer.incomplete
    late = image.ask(QUESTION, schema=FORM, fill=True, timeout=1e-6)
    assert late.stopped == "timeout"
    whole = image.ask(QUESTION, schema=FORM, fill=True, max_new_tokens=24)
    assert (whole.stopped, whole.incomplete) == ("end", False)


def test_a_chat_goes_on_from_the_form(image: Conversation) -> None:
    chat = image.chat()
    answer = chat.ask(QUESTION, schema=FORM, fill=True, max_new_tokens=24)
    assert chat.messages[-1]["content"] == [{"type": "text", "text": answer.text}]
    assert chat.ask("Where?", max_new_tokens=4).token_ids


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"fill": True}, "fill is for a schema"),
        ({"schema_in_prompt": True, "regex": "a"}, "schema_in_prompt is for a schema"),
        ({"schema": FORM, "fill": True, "schema_in_prompt": True}, "mutually exclusive"),
        ({"schema": {"type": "string"}, "fill": True}, "schema that lists fields"),
        ({"schema": {"type": "object", "properties": {}}, "fill": True}, "schema that lists fields"),
        ({"schema": {**FORM, "minProperties": 2}, "fill": True}, "minProperties"),
        ({"schema": {**FORM, "required": ["size", "weight"]}, "fill": True}, "required: weight"),
        ({"schema": FORM, "fill": True, "temperature": 0.5}, "leave temperature out"),
        ({"schema": FORM, "fill": True, "logprobs": True}, "leave logprobs out"),
    ],
)
def test_forms_that_cannot_be_filled_in_are_refused(
    image: Conversation, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        image.stream(QUESTION, **keywords)


def test_the_schema_in_the_prompt_is_part_of_the_question(model: Model, image: Conversation) -> None:
    guide = Guide(schema=COUNT)
    told = image.ask(QUESTION, schema=COUNT, schema_in_prompt=True, max_new_tokens=8)
    written = f"{QUESTION}\nAnswer with JSON that matches this schema: {guide.schema}"
    by_hand = image.ask(written, schema=COUNT, max_new_tokens=8)
    assert (told.token_ids, told.stats.prompt_tokens) == (by_hand.token_ids, by_hand.stats.prompt_tokens)
    assert told.stats.prompt_tokens > image.ask(QUESTION, schema=COUNT, max_new_tokens=8).stats.prompt_tokens


@pytest.mark.slow
def test_commands_and_the_server_fill_in_forms(model: Model, image: Conversation, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    random_image(1).save(picture)
    wanted = image.ask(QUESTION, schema=FORM, fill=True, max_new_tokens=24)
    told = image.ask(QUESTION, schema=FORM, schema_in_prompt=True, max_new_tokens=24)
    words = ["--bundle", str(model.bundle.folder), "--device", "cpu", "--threads", "1", "--max-new-tokens", "24"]
    words += ["--json-schema", json.dumps(FORM)]
    done = CliRunner().invoke(run, [str(picture), QUESTION, *words, "--fill", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["text"], facts["free_text"]) == (wanted.text, wanted.free_text)
    alone = CliRunner().invoke(run, [str(picture), QUESTION, *words[:6], "--fill"])
    assert alone.exit_code == 1
    assert "--fill is for a schema; add --json-schema" in alone.output
    with serving({"m": model.bundle.folder}) as served:
        body = {"model": "m", "messages": [user(QUESTION, random_image(1))], "max_tokens": 24, "guided_json": FORM}
        filled = served.chat({**body, "fill": True})
        assert filled.status == 200, filled.body
        assert filled.json["choices"][0]["message"]["content"] == wanted.text
        usage = filled.json["usage"]["vtx"]
        assert usage["free_text"] == wanted.free_text
        assert usage["fields"]["count"]["value"] == json.loads(wanted.text)["count"]
        in_prompt = served.chat({**body, "schema_in_prompt": True})
        assert in_prompt.json["choices"][0]["message"]["content"] == told.text
        refused = served.chat({"model": "m", "messages": body["messages"], "fill": True})
        assert refused.status == 400
        assert "fill is for a schema" in refused.json["error"]["message"]
