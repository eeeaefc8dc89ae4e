"""Fields that are not declared are refused at every depth; a lenient server ignores those that change nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Served, asking, data_url, serving, user
from tests.support.tiny import random_image
from vtx.runtime.server import anthropic, ollama
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai import completions, embeddings, responses
from vtx.runtime.server.openai.fields import NEVER_IGNORED
from vtx.runtime.server.openai.request import read_request
from vtx.runtime.server.refusal import Refusal

URL = data_url(random_image(1))
PARAMETERS = {"type": "object", "properties": {"unknown_here_is_fine": {"type": "string"}}}
CALL = {"id": "a", "type": "function", "index": 0, "function": {"name": "draw", "arguments": "{}"}}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "user", "name": "me", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA==", "frames": 2}},
        ]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "user", "content": "b"},
    ],
    "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False},
    "tools": [{"type": "function", "function": {"name": "draw", "parameters": PARAMETERS, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "draw"}}, "logit_bias": {"5": 1},
}  # fmt: skip
FORM = {
    "model": "tiny", "messages": [{"role": "user", "content": "a"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS, "strict": True}},
}  # fmt: skip
RESPONSE = {
    "model": "tiny", "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}},
    "input": [
        {"role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL, "detail": "low"},
        ]},
        {"id": "m", "type": "message", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"id": "f", "type": "function_call", "status": "completed", "call_id": "c", "name": "draw", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "user", "content": "and?"},
    ],
}  # fmt: skip
TOOLS = {
    "model": "tiny", "input": "a", "tools": [{"type": "function", "name": "draw", "parameters": PARAMETERS}],
    "tool_choice": {"type": "function", "name": "draw"},
}  # fmt: skip
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
MESSAGES = {
    "model": "tiny", "system": [{"type": "text", "text": "a"}], "max_tokens": 4,
    "messages": [
        {"role": "user", "content": [BLOCK, {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "draw", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
            {"type": "text", "text": "done"},
        ]}, {"type": "text", "text": "and?"}]},
    ],
    "tools": [{"name": "draw", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}  # fmt: skip
OLLAMA = {
    "model": "tiny", "options": {"temperature": 0, "num_predict": 4, "num_ctx": 4096}, "tools": CHAT["tools"],
    "messages": [
        {"role": "user", "content": "a", "images": [URL.partition(",")[2]]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "draw", "arguments": {}}}]},
        {"role": "tool", "content": "done", "tool_name": "draw"},
    ],
}  # fmt: skip
KINDS = {
    "chat": (CHAT, None), "form": (FORM, None), "response": (RESPONSE, responses.chat_fields),
    "tools": (TOOLS, responses.chat_fields),
    "completion": ({"model": "tiny", "prompt": ["a", [5]], "echo": True}, completions.chat_fields),
    "tokens": ({"model": "tiny", "tokens": [5]}, completions.token_fields),
    "messages": (MESSAGES, anthropic.chat_fields), "ollama": (OLLAMA, ollama.chat_fields),
    "generate": ({"model": "tiny", "prompt": "a", "format": "json"}, ollama.generate_fields),
    "embeddings": ({"model": "tiny", "input": [URL]}, embeddings.chat_fields),
}  # fmt: skip
NAMES = (  # of fields that change the prompt or the form in some server
    "previous_response_id", "conversation", "echo", "structured_outputs", "grammar", "images", "fps", "ebnf",
    "image_urls", "input", "instructions", "lora", "regex",
)  # fmt: skip
FREE = {"parameters", "schema", "logit_bias", "input_schema", "cache_control", "arguments"}  # names are the client's


def read(body: Any, translate: Any, *, lenient: bool = False) -> Any:
    return read_request(json.dumps(body).encode(), Limits(), lenient=lenient, translate=translate)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all objects in a body whose fields are declared."""
    if isinstance(value, dict):
        yield path
        for name, item in value.items():
            free = name in FREE or (name == "input" and isinstance(item, dict))
            yield from () if free else places(item, (*path, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def declared(body: Any, path: tuple[Any, ...]) -> Any:
    """The object at a path."""
    for step in path:
        body = body[step]
    return body


def changed(body: Any, path: tuple[Any, ...], name: str) -> Any:
    """The body with an unknown field in the object at a path."""
    body = copy.deepcopy(body)
    declared(body, path)[name] = {"value": 1}
    return body


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_refused_in_every_object_and_ignored_by_a_lenient_server(kind: str) -> None:
    body, translate = KINDS[kind]
    read(body, translate)
    for path in places(body):
        with pytest.raises(Refusal, match="there is no field 'no_such'") as error:
            read(changed(body, path, "no_such"), translate)
        assert error.value.code == "unknown_parameter"
        assert str(error.value.param).endswith("no_such")
        ignored = read(changed(body, path, "no_such"), translate, lenient=True).notes["ignored"]
        assert [name.rpartition(": ")[2] for name in ignored] == ["'no_such'"], path


def test_a_byte_order_mark_before_a_body_does_not_matter() -> None:
    body = json.dumps(FORM)
    assert read_request(body.encode("utf-8-sig"), Limits()) == read_request(body.encode(), Limits())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_no_server_ignores_what_changes_the_prompt_or_the_form(kind: str) -> None:
    body, translate = KINDS[kind]
    for path in places(body):
        for name in set(NAMES) - set(declared(body, path)):
            assert name in NEVER_IGNORED
            with pytest.raises(Refusal):
                read(changed(body, path, name), translate, lenient=True)


def test_pictures_beside_the_content_are_not_answered_without_them(tiny_bundle: Path) -> None:
    coded = URL.partition(",")[2]
    url = {"url": URL}
    sized = {"type": "image_url", "image_url": {**url, "max_pixels": 9}}
    messages = [
        {"role": "user", "content": "red?", "images": [coded]},
        {"role": "user", "content": "red?", "image_url": url},
        {"role": "user", "content": [sized, {"type": "text", "text": "red?"}]},
    ]
    for lenient in (False, True):
        with serving({"tiny": tiny_bundle}, lenient=lenient) as served:
            for message in messages:
                reply = served.chat(asking(message))
                assert reply.status == 400
                assert "there is no field" in reply.json["error"]["message"]
            form = {"type": "json_object", "schema": {"type": "object"}}
            assert served.chat(asking(user("red?"), response_format=form)).status == 400


def test_what_the_server_answered_is_accepted_again(tiny_bundle: Path) -> None:
    """Replies as clients send them back: with null, empty and repeated fields."""
    with serving({"tiny": tiny_bundle}) as served:
        message = served.chat(asking(user("red?"))).json["choices"][0]["message"]
        assert served.chat(asking(user("red?"), message, user("why?"))).status == 200
        body = {"model": "tiny", "input": "red?", "max_output_tokens": 4}
        first = post(served, "/v1/responses", body)
        items = [{"role": "user", "content": "red?"}, *first["output"], {"role": "user", "content": "why?"}]
        assert post(served, "/v1/responses", {**body, "input": items})["object"] == "response"


def post(served: Served, path: str, body: Any) -> Any:
    return served.request("POST", path, json.dumps(body).encode(), content_type="application/json").json
