"""Guided answers over HTTP: OpenAI's and vLLM's fields, several at once, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.serving import Served, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
ASKED = {"model": "tiny", "messages": [user("red?", random_image(1))], "max_tokens": 60, "k": "none", "reduce": "none"}
SCHEMA = {
    "type": "object", "properties": {"shape": {"enum": ["circle", "square"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["shape", "n"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
WAYS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"response_format": FORMAT}, {"schema": SCHEMA}),
    ({"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
    ({"guided_json": json.dumps(SCHEMA), "temperature": 1.5, "seed": 3},
     {"schema": SCHEMA, "temperature": 1.5, "seed": 3}),
    ({"guided_choice": ["red", "red circle"]}, {"choices": ["red", "red circle"]}),
    ({"guided_regex": "[a-f]{3,9}"}, {"regex": "[a-f]{3,9}"}),
    ({"guided_grammar": 'start: "is " /[a-z]{4}/', "logprobs": True},
     {"grammar": 'start: "is " /[a-z]{4}/', "logprobs": True}),
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


def test_answers_computed_together_are_those_of_fresh_runs(served: Served, local: Model) -> None:
    fresh = []
    for _, keywords in WAYS:
        with local.open(random_image(1)) as image:
            fresh.append(image.ask("red?", None, reduce="none", max_new_tokens=60, **keywords))
    with ThreadPoolExecutor(len(WAYS)) as threads:
        replies = list(threads.map(lambda way: served.chat({**ASKED, **way[0]}), WAYS * 2))
    for reply, answer in zip(replies, fresh * 2, strict=True):
        assert reply.status == 200, reply.body
        choice = reply.json["choices"][0]
        assert reply.json["usage"]["vtx"]["token_ids"] == list(answer.token_ids)
        odds = reply.json["usage"]["vtx"].get("choices")
        assert odds == (None if answer.choices is None else pytest.approx(answer.choices, abs=1e-6))
        assert choice["finish_reason"] == {"end": "stop", "length": "length"}[answer.stopped]
    jsonschema.validate(json.loads(replies[0].json["choices"][0]["message"]["content"]), SCHEMA)


def test_a_stream_gives_every_forced_token(served: Served) -> None:
    whole = served.chat({**ASKED, "response_format": FORMAT}).json["choices"][0]["message"]["content"]
    assert served.chat({**ASKED, "response_format": FORMAT, "stream": True}).text == whole


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": "json"}, "response_format", "json_schema"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_regex", "give one"),
        ({"guided_regex": "(("}, "guided_regex", "unclosed"),
        ({"guided_json": {"type": "picture"}}, "guided_json", "picture"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no answer"),
        ({"guided_regex": "a", "stop": "a"}, "guided_regex", "leave stop out"),
        ({"guided_choice": [str(n) for n in range(1025)]}, "guided_choice", "the limit is 1,024"),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "the limit is 65,536"),
    ],
)
def test_what_cannot_guide_an_answer_is_refused(served: Served, fields: dict[str, Any], param: str, said: str) -> None:
    reply = served.chat({**ASKED, **fields})
    assert reply.status == 400
    assert said in reply.json["error"]["message"]
    assert reply.json["error"]["param"] == param


def test_a_client_that_leaves_amid_a_forced_run_harms_nobody(served: Served) -> None:
    for _ in range(3):
        connection = served.open_chat({**ASKED, "response_format": FORMAT, "stream": True})
        connection.recv(300)
        connection.close()
    reply = served.chat({**ASKED, "response_format": FORMAT}).json
    jsonschema.validate(json.loads(reply["choices"][0]["message"]["content"]), SCHEMA)
