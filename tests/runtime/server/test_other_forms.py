"""Anthropic's and Ollama's forms of a request, vLLM's and llama.cpp's of an answer: the answers of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.calling import PARAMETERS, TOOLS, calling_bundle
from tests.support.serving import Response, Served, asking, data_url, serving, user
from tests.support.tiny import random_image
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import of_gbnf
from vtx.runtime.server.keys import DAY, Keys, Tenant
from vtx.runtime.server.refusal import Refusal

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
IMAGE = random_image(1)
CODED = data_url(IMAGE).partition(",")[2]
PLAIN = {"k": "none", "reduce": "none"}
SAME = {"model": "tiny", "max_tokens": 8, "ignore_eos": True, **PLAIN}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CODED}}
SYSTEM, QUESTION = "the image is red", "which?"
BLOCKS = [{"role": "user", "content": [BLOCK, {"type": "text", "text": QUESTION}]}]
CHAT = [{"role": "system", "content": SYSTEM}, user(QUESTION, IMAGE)]
OLLAMA = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION, "images": [CODED]}]
EIGHT = {"model": "tiny", "options": {"num_predict": 8, "num_ctx": 4096}, "ignore_eos": True, **PLAIN}
CALLING = {"model": "calling", "max_tokens": 250, "temperature": 1.5, "seed": 3, **PLAIN}
CALLABLE = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


@pytest.fixture(scope="module")
def calling(packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving({"calling": calling_bundle(tmp_path_factory.mktemp("calling"))}) as served:
        yield served


def post(served: Served, path: str, body: Any, **headers: str) -> Response:
    return served.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)


def events(reply: Response) -> list[Any]:
    """The events of a stream, each under the name of its type."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in reply.body.decode().split("\n\n") if block]
    objects = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in objects]
    return objects


def lines(reply: Response) -> list[Any]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.splitlines()]


def put_together(stream: list[Any]) -> tuple[list[Any], Any]:
    """The blocks and the ending that Anthropic's events give."""
    blocks, ending = list[Any](), None
    for event in stream:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            block["json"] += delta.get("partial_json", "")
            block["text"] = block.get("text", "") + delta.get("text", "")
        elif event["type"] == "message_delta":
            ending = event["delta"] | event["usage"]
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    assert sum(event["type"] == "content_block_stop" for event in stream) == len(blocks)
    return blocks, ending


def test_a_message_of_blocks_has_the_answer_of_the_chat(served: Served) -> None:
    chat = served.chat({**SAME, "messages": CHAT}).json
    body = {**SAME, "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]}
    whole = post(served, "/v1/messages", {**body, "messages": BLOCKS}).json
    assert whole["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert whole["usage"]["vtx"]["token_ids"] == chat["usage"]["vtx"]["token_ids"]
    assert (whole["stop_reason"], whole["role"], whole["type"]) == ("max_tokens", "assistant", "message")
    used = whole["usage"]
    prompt = used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    assert (prompt, used["output_tokens"]) == (chat["usage"]["prompt_tokens"], 8)
    counted = post(served, "/v1/messages/count_tokens", {"model": "tiny", "system": SYSTEM, "messages": BLOCKS}).json
    assert counted == {"input_tokens": prompt}
    stream = events(post(served, "/v1/messages", {**body, "messages": BLOCKS, "stream": True}))
    assert stream[0]["message"]["usage"] == {"input_tokens": prompt, "output_tokens": 0}
    blocks, ending = put_together(stream)
    assert [block["text"] for block in blocks] == [whole["content"][0]["text"]]
    assert (ending["stop_reason"], ending["output_tokens"]) == ("max_tokens", 8)


def test_a_stop_sequence_is_named(served: Served) -> None:
    text = served.chat({**SAME, "messages": CHAT}).json["choices"][0]["message"]["content"]
    stop = text.strip()[3]
    body = {**SAME, "system": SYSTEM, "messages": BLOCKS, "stop_sequences": [stop]}
    reply = post(served, "/v1/messages", body).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert stop not in reply["content"][0]["text"]


@pytest.mark.slow
def test_calls_are_blocks_whole_and_streamed_and_their_results_continue_the_chat(calling: Served) -> None:
    asked = {**CALLING, "messages": [{"role": "user", "content": "red?"}], "tools": CALLABLE}
    chat = calling.chat(
        {**CALLING, "messages": [user("red?")], "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    ).json["choices"][0]["message"]["tool_calls"]  # fmt: skip
    whole = post(
        calling, "/v1/messages", {**asked, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    ).json
    assert whole["stop_reason"] == "tool_use"
    uses = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert [(use["name"], use["input"]) for use in uses] == [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in chat
    ]
    reply = post(
        calling,
        "/v1/messages",
        {**asked, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stream": True},
    )
    blocks, ending = put_together(events(reply))
    assert [(one["name"], json.loads(one["json"])) for one in blocks if one["type"] == "tool_use"] == [
        (use["name"], use["input"]) for use in uses
    ]
    assert ending["stop_reason"] == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "done"} for use in uses]
    turns = [*asked["messages"], {"role": "assistant", "content": whole["content"]}]
    turns.append({"role": "user", "content": [*results, {"type": "text", "text": "and?"}]})
    counted = post(calling, "/v1/messages/count_tokens", {"model": "calling", "messages": turns, "tools": CALLABLE})
    said = {"role": "assistant", "content": "", "tool_calls": chat}
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in chat]
    same = {"model": "calling", "messages": [user("red?"), said, *told, user("and?")], "tools": TOOLS}
    assert counted.json["input_tokens"] == post(calling, "/tokenize", same).json["count"]


def test_ollama_s_chat_and_generate_have_the_answer_of_the_chat(served: Served) -> None:
    chat = served.chat({**SAME, "messages": CHAT}).json
    text, tokens = chat["choices"][0]["message"]["content"], chat["usage"]["vtx"]["token_ids"]
    whole = post(served, "/api/chat", {**EIGHT, "model": "tiny:latest", "messages": OLLAMA, "stream": False}).json
    assert (whole["message"]["content"], whole["vtx"]["token_ids"]) == (text, tokens)
    assert (whole["model"], whole["done"], whole["done_reason"], whole["eval_count"]) == ("tiny", True, "length", 8)
    stream = lines(post(served, "/api/chat", {**EIGHT, "messages": OLLAMA}))
    assert "".join(line["message"]["content"] for line in stream) == text
    assert [line["done"] for line in stream] == [False] * (len(stream) - 1) + [True]
    asked = {**EIGHT, "prompt": QUESTION, "system": SYSTEM, "images": [CODED]}
    assert post(served, "/api/generate", {**asked, "stream": False}).json["response"] == text
    assert "".join(line["response"] for line in lines(post(served, "/api/generate", asked))) == text
    stop = text.strip()[3]
    for stops in (stop, [stop, "never"]):
        options = {**EIGHT["options"], "stop": stops, "use_mlock": True}  # type: ignore[dict-item]
        cut = post(served, "/api/chat", {**EIGHT, "options": options, "messages": OLLAMA, "stream": False}).json
        assert (cut["message"]["content"], cut["done_reason"]) == (text.partition(stop)[0], "stop")
    raw = {**EIGHT, "prompt": "USER: red? ASSISTANT:", "raw": True, "stream": False}
    assert post(served, "/api/generate", raw).json["response"]


def test_ollama_s_calls_come_whole(calling: Served) -> None:
    options = {"num_predict": 250, "temperature": 1.5, "seed": 3}
    body = {"model": "calling", "messages": [{"role": "user", "content": "red?"}], "tools": TOOLS, **PLAIN}
    body |= {"options": options, "tool_choice": "required", "parallel_tool_calls": False}
    calls = post(calling, "/api/chat", {**body, "stream": False}).json["message"]["tool_calls"]
    assert all(set(call["function"]["arguments"]) == set(PARAMETERS["properties"]) for call in calls)
    stream = [line["message"].get("tool_calls", []) for line in lines(post(calling, "/api/chat", body))]
    assert [call for told in stream for call in told] == calls


def test_what_ollama_s_clients_ask_before_a_chat(served: Served) -> None:
    [tag] = served.request("GET", "/api/tags").json["models"]
    assert (tag["name"], tag["details"]["quantization_level"]) == ("tiny", "fp32")
    shown = post(served, "/api/show", {"model": "tiny:latest"}).json
    assert "vision" in shown["capabilities"]
    assert served.request("GET", "/api/version").json["version"]
    assert post(served, "/api/show", {"model": "other"}).status == 404
    post(served, "/api/chat", {**EIGHT, "messages": OLLAMA, "stream": False})
    assert [model["name"] for model in served.request("GET", "/api/ps").json["models"]] == ["tiny"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/messages", {"messages": [{"role": "system", "content": "a"}]}, "must be user or assistant"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of type text, image"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "no switch for thoughts"),
        ("/v1/messages", {"n": 2}, "no field n"),
        ("/v1/messages", {"system": 5}, "system is 5"),
        ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ("/api/chat", {"think": True}, "no switch for thoughts"),
        ("/api/chat", {"options": {"mirostat": 2}}, "no field 'mirostat' in options"),
        ("/api/chat", {"format": "xml"}, "must be json or a schema"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["!"]}]}, "base64"),
        ("/api/chat", {"max_tokens": 3}, "no field max_tokens"),
    ],
)
def test_errors_have_the_form_of_the_address(served: Served, path: str, fields: Any, words: str) -> None:
    turns = {"messages": [{"role": "user", "content": "a"}]}
    reply = post(served, path, {"model": "tiny", **turns, **fields})
    assert reply.status == 400
    error = reply.json["error"]
    if path == "/v1/messages":
        assert (reply.json["type"], error["type"]) == ("error", "invalid_request_error")
    assert words in (error["message"] if path == "/v1/messages" else error)


def test_a_key_by_itself_is_accepted_and_its_refusal_has_the_form_of_the_address(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["secret"]) as served:
        body = {**SAME, "messages": BLOCKS}
        assert post(served, "/v1/messages", body, x_api_key="secret").status == 200
        wrong = post(served, "/v1/messages", body, x_api_key="other")
        assert (wrong.status, wrong.json["error"]["type"]) == (401, "authentication_error")
        usage = served.request("GET", "/v1/usage", x_api_key="secret").json
        assert (usage["requests"], usage["completion_tokens"]) == (1, 8)
        assert usage["tokens_today"] == usage["prompt_tokens"] + 8


def test_the_tokens_of_a_day_are_a_limit_until_midnight() -> None:
    date, tenant = [10 * DAY + 100.0], Tenant("a", "a", tokens=50)
    keys = Keys({"k": tenant}, date=lambda: date[0])
    keys.admit(tenant)
    keys.count(tenant, 40, 10)
    with pytest.raises(Refusal, match="used 50 tokens today, the limit is 50") as error:
        keys.admit(tenant)
    assert error.value.retry_after == DAY - 100 + 1
    date[0] = 11 * DAY
    keys.admit(tenant)
    assert keys.usage(tenant)["tokens_today"] == 0
    assert keys.usage(tenant)["prompt_tokens"] == 40


def test_forms_of_an_answer_under_vllm_s_and_llama_cpp_s_names(served: Served) -> None:
    asked = asking(user("red?"), **PLAIN, ignore_eos=False, max_tokens=60)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    for name, value in {"json": schema, "choice": ["red", "blue"], "regex": "[a-c]{3}"}.items():
        replies = [
            served.chat({**asked, **fields}).json["choices"][0]["message"]["content"]
            for fields in ({"structured_outputs": {name: value}}, {f"guided_{name}": value})
        ]
        assert replies[0] == replies[1]
    reply = served.chat({**asked, "grammar": 'root ::= ("ab" | "ba") [0-9]{2}'}).json
    assert reply["choices"][0]["message"]["content"][:2] in ("ab", "ba")
    for fields in ({"grammar": "root ="}, {"structured_outputs": {"json": schema, "regex": "a"}}):
        assert served.chat({**asked, **fields}).status == 400
    with pytest.raises(RequestError, match="not GBNF"):
        of_gbnf("root ::= " + "(" * 8000)


def test_a_server_of_one_bundle_needs_no_name(served: Served) -> None:
    body = {name: value for name, value in SAME.items() if name != "model"} | {"messages": CHAT}
    assert served.chat(body).json["model"] == "tiny"


def test_the_tokens_of_a_text(served: Served) -> None:
    texts = [post(served, "/tokenize", {"model": "tiny", name: "USER: red?"}).json for name in ("prompt", "content")]
    assert texts[0] == texts[1]
    assert texts[0]["count"] == len(texts[0]["tokens"]) > 2
