"""Tools over HTTP: whole and streamed calls that parse, OpenAI's own clients of both APIs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.calling import PARAMETERS, TOOLS, calling_bundle, tool
from tests.support.serving import Served, serving, user
from tests.support.tiny import random_image
from vtx.runtime.server.limits import Limits

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
IMAGE = random_image(1)
ASKED = {"model": "calling", "messages": [user("red?", IMAGE)], "max_tokens": 250, "temperature": 1.5, "k": "none",
         "reduce": "none"}  # fmt: skip
FLAT = [one["function"] | {"type": "function"} for one in TOOLS]
SEEDS = (1, 3, 7)


@pytest.fixture(scope="module")
def served(packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bundle = calling_bundle(tmp_path_factory.mktemp("calling"))
    with serving({"calling": bundle}, Limits(comment_seconds=60)) as served:
        yield served


def put_together(events: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """The content, the calls and the reason for the end that chunks give."""
    content, calls, finish = "", list[dict[str, Any]](), ""
    for choice in (choice for event in events for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "type": delta["type"], "function": {"name": "", "arguments": ""}})
            for name, text in delta["function"].items():
                calls[delta["index"]]["function"][name] += text
    return content, calls, finish


def without_ids(calls: Any) -> list[Any]:
    return [call["function"] for call in calls or ()]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "erase"}}])
def test_calls_parse_and_a_stream_gives_the_same(served: Served, choice: Any) -> None:
    ends = set()
    for seed in SEEDS:
        body = {**ASKED, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        [whole] = served.chat(body).json["choices"]
        message, events = whole["message"], served.chat({**body, "stream": True}).events
        content, calls, finish = put_together(events)
        assert (content or None, finish) == (message["content"] or None, whole["finish_reason"])
        assert without_ids(calls) == without_ids(message.get("tool_calls"))
        assert len({call["id"] for call in calls}) == len(calls)
        ends.add(finish)
        if finish == "tool_calls":
            for call in without_ids(calls):
                jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)
                assert call["name"] in ("draw", "erase")[isinstance(choice, dict) :]
    assert ("tool_calls" in ends) == (choice != "auto"), "a random model calls only what it must"


def test_no_tools_are_offered_with_tool_choice_none(served: Served) -> None:
    plain, none = (
        served.chat(ASKED | {"seed": 1}),
        served.chat({**ASKED, "tools": TOOLS, "tool_choice": "none", "seed": 1}),
    )
    assert none.json["choices"] == plain.json["choices"]
    assert none.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]


def test_calls_and_results_of_earlier_turns_are_in_the_prompt(served: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "draw", "arguments": '{"count": 3, "shape": "circle"}'}}
    turns = [
        *ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "drawn"},
    ]  # fmt: skip
    counts = []
    for messages in (turns[:1], turns):
        body = json.dumps({**ASKED, "messages": messages, "tools": TOOLS}).encode()
        counts.append(served.request("POST", "/tokenize", body, content_type="application/json").json["count"])
    assert counts[1] > counts[0] + 40
    assert served.chat({**ASKED, "messages": turns, "tools": TOOLS, "max_tokens": 3}).status == 200


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [tool("a b")]}, "tools", "letters, digits"),
        ({"tools": [{"type": "web_search"}]}, "tools", "has no function"),
        ({"tools": [tool("a", {"$ref": "#"})], "tool_choice": "required"}, "tools", "circular"),
        ({"tools": [tool("a", {"not": {}})]}, "tools", "not"),
        ({"tools": [tool("a", {"description": "x" * 70_000})]}, "tools", "the limit is 65,536"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "no tool"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "no tool"),
        ({"tool_choice": "required"}, "tool_choice", "next to tools"),
        ({"tools": TOOLS, "stop": "a"}, "tools", "leave stop out"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools", "give one"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
         "messages", "the last message"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "tool_calls": [{}]}, user("?")]}, "messages", "call"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "tool_calls": [
            {"function": {"name": "a", "arguments": "{]"}}]}, user("?")]}, "messages", "not sound JSON"),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_with_the_field_s_name(
    served: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    reply = served.chat({**ASKED, **fields})
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body
    assert said in reply.json["error"]["message"]


def test_a_template_without_tools_refuses_them_by_name(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        reply = served.chat({**ASKED, "model": "tiny", "tools": TOOLS})
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
        assert "knows no tools" in reply.json["error"]["message"]


def test_clients_that_leave_amid_calls_harm_nobody(served: Served) -> None:
    body = {**ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 1}
    whole = served.chat(body).json["choices"][0]["message"]
    for _ in range(5):
        connection = served.open_chat({**body, "stream": True})
        connection.recv(400)
        connection.close()
    assert without_ids(served.chat(body).json["choices"][0]["message"]["tool_calls"]) == without_ids(
        whole["tool_calls"]
    )


@pytest.mark.slow
def test_openai_s_client_of_responses_parses_text_calls_and_forms(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="needs the openai package, of the extra dev")
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        url = ASKED["messages"][0]["content"][0]["image_url"]["url"]
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "red?"}]
        asked = {
            "model": "calling", "input": [{"role": "user", "content": parts}], "temperature": 1.5,
            "max_output_tokens": 250, "extra_body": {"seed": 3, "k": "none", "reduce": "none"},
        }  # fmt: skip
        chat = served.chat({**ASKED, "seed": 3}).json
        plain = client.responses.create(**asked)
        assert plain.output_text == chat["choices"][0]["message"]["content"]
        assert plain.usage.input_tokens == chat["usage"]["prompt_tokens"]
        assert plain.status == ("completed" if chat["choices"][0]["finish_reason"] == "stop" else "incomplete")
        with client.responses.stream(**asked) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == plain.output_text

        called = client.responses.create(**asked, tools=FLAT, tool_choice="required")
        events = list(client.responses.create(**asked, tools=FLAT, tool_choice="required", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        calls = [(item.name, item.arguments) for item in called.output if item.type == "function_call"]
        assert calls
        assert calls == [(item.name, item.arguments) for item in events[-1].response.output]
        for item in called.output[: None if called.status == "completed" else -1]:
            jsonschema.validate(json.loads(item.arguments), PARAMETERS)
        results = [{"type": "function_call_output", "call_id": i.call_id, "output": "ok"} for i in called.output[:1]]
        turns = [*asked["input"], *called.output[:1], *results]
        after = client.responses.create(**{**asked, "input": turns, "tools": FLAT, "tool_choice": "none"})
        assert after.usage.input_tokens > plain.usage.input_tokens + 40

        form = {"format": {"type": "json_schema", "name": "shape", "schema": PARAMETERS, "strict": True}}
        shaped = client.responses.create(**asked, text=form, instructions="Answer in JSON.")
        jsonschema.validate(json.loads(shaped.output_text), PARAMETERS)
        for fields, param in (({"previous_response_id": "resp_1"}, "previous_response_id"), ({"text": "x"}, "text"),
                              ({"input": []}, "input"), ({"tools": [{"type": "web_search"}]}, "tools")):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**{**asked, **fields})
            assert refused.value.param == param
