"""Thoughts in the replies of each address, whole and streamed, and the fields that switch and limit them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.calling import THINKING, Scripted, calling_bundle
from tests.support.serving import Response, Served, asking, serving, user
from vtx.runtime.api import answering
from vtx.runtime.bundle.spec.manifest import TOKENIZER

ANSWER = "\nIt is red.\n</think>\n\nRed."
ON = {"enable_thinking": True}
DELTAS = ("response.reasoning_text.delta", "response.output_text.delta")


@pytest.fixture(scope="module")
def served(packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = calling_bundle(tmp_path_factory.mktemp("thinking"), THINKING)
    ids = Tokenizer.from_file(str(folder / TOKENIZER)).encode(ANSWER, add_special_tokens=False).ids
    with serving({"tiny": folder}) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "Sampler", lambda *_: Scripted(ids))
        yield served


@pytest.fixture(scope="module")
def tokens(served: Served) -> dict[str, int]:
    """The tokens of the answer and of its thought."""
    reply = served.chat(asking(user("red?"), chat_template_kwargs=ON) | {"max_tokens": 40}).json
    [thought] = [reply["usage"]["completion_tokens_details"]["reasoning_tokens"]]
    ids = reply["usage"]["vtx"]["token_ids"]
    text = post(served, "/detokenize", tokens=ids).json["prompt"]
    end = text.index("Red.") + len("Red.")
    count = next(n for n in range(len(ids)) if len(post(served, "/detokenize", tokens=ids[:n]).json["prompt"]) == end)
    return {"answer": count, "thought": thought}


def post(served: Served, path: str, **body: Any) -> Response:
    return served.request("POST", path, json.dumps({"model": "tiny", **body}).encode(), content_type="application/json")


def events(reply: Response) -> list[dict[str, Any]]:
    """The objects of a stream of Anthropic's or OpenAI's responses."""
    lines = reply.body.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_chat_completions_have_reasoning_content(served: Served, tokens: dict[str, int]) -> None:
    body = asking(user("red?"), chat_template_kwargs=ON) | {"max_tokens": tokens["answer"]}
    reply = served.chat(body).json
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is red.", "Red.")
    assert 0 < tokens["thought"] < tokens["answer"]
    assert "thought" not in reply["usage"]["vtx"]
    deltas = [event["choices"][0]["delta"] for event in served.chat(body | {"stream": True}).events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is red."
    assert "".join(delta.get("content", "") for delta in deltas) == "Red."
    assert len([delta for delta in deltas if "reasoning_content" in delta]) > 3
    off = served.chat(body | {"chat_template_kwargs": {"enable_thinking": False}}).json["choices"][0]["message"]
    assert "reasoning_content" not in off
    assert off["content"] == ANSWER.lstrip()
    effort = asking(user("red?"), reasoning_effort="low") | {"max_tokens": tokens["answer"]}
    assert served.chat(effort).json["choices"][0]["message"] == message


def test_a_request_limits_its_thought(served: Served) -> None:
    body = asking(user("red?"), chat_template_kwargs=ON, max_thinking_tokens=2) | {"max_tokens": 40}
    usage = served.chat(body).json["usage"]
    limited = served.chat(body | {"max_thinking_tokens": 3}).json["usage"]
    counts = [one["completion_tokens_details"]["reasoning_tokens"] for one in (usage, limited)]
    assert counts[1] == counts[0] + 1
    thinking = {"type": "enabled", "budget_tokens": 2}
    message = post(
        served, "/v1/messages", messages=[{"role": "user", "content": "red?"}], max_tokens=40, thinking=thinking
    )
    assert message.json["usage"]["vtx"]["thought_tokens"] == counts[0]


def test_anthropic_s_messages_have_a_block_of_thinking(served: Served, tokens: dict[str, int]) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "red?"}]
    body = {"messages": turns, "max_tokens": tokens["answer"], "thinking": {"type": "enabled"}}
    reply = post(served, "/v1/messages", **body).json
    thought = {"type": "thinking", "thinking": "It is red.", "signature": ""}
    assert reply["content"] == [thought, {"type": "text", "text": "Red."}]
    stream = events(post(served, "/v1/messages", **body, stream=True))
    assert [event["index"] for event in stream if event["type"] == "content_block_stop"] == [0, 1]
    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "It is red."
    assert "".join(delta.get("text", "") for delta in deltas) == "Red."
    again = [*turns, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "sure?"}]
    assert post(served, "/v1/messages", **body | {"messages": again}).status == 200
    off = post(served, "/v1/messages", **body | {"thinking": {"type": "disabled"}}).json
    assert [block["type"] for block in off["content"]] == ["text"]


@pytest.mark.parametrize(("path", "fields"), [
    ("/api/chat", {"messages": [{"role": "user", "content": "red?"}]}), ("/api/generate", {"prompt": "red?"}),
])  # fmt: skip
def test_ollama_s_replies_have_thinking(
    served: Served, tokens: dict[str, int], path: str, fields: dict[str, Any]
) -> None:
    body = {**fields, "think": True, "options": {"num_predict": tokens["answer"]}}
    reply = post(served, path, **body, stream=False).json
    said = reply.get("message", reply)
    assert (said["thinking"], said.get("content", said.get("response"))) == ("It is red.", "Red.")
    lines = [json.loads(line) for line in post(served, path, **body).body.decode().splitlines()]
    parts = [line.get("message", line) for line in lines]
    assert "".join(part.get("thinking", "") for part in parts) == "It is red."
    assert "".join(part.get("content", part.get("response", "")) for part in parts) == "Red."
    off = post(served, path, **body | {"think": False}, stream=False).json
    assert "thinking" not in off.get("message", off)


def test_responses_have_an_item_of_reasoning(served: Served, tokens: dict[str, int]) -> None:
    body = {"input": "red?", "max_output_tokens": tokens["answer"], "reasoning": {"effort": "high"}}
    reply = post(served, "/v1/responses", **body).json
    reasoning, message = reply["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "It is red.")
    assert message["content"][0]["text"] == "Red."
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == tokens["thought"]
    stream = events(post(served, "/v1/responses", **body, stream=True))
    deltas = {kind: "".join(event["delta"] for event in stream if event["type"] == kind) for kind in DELTAS}
    assert deltas == dict(zip(DELTAS, ("It is red.", "Red."), strict=True))
    assert [event["output_index"] for event in stream if event["type"] == "response.output_item.done"] == [0, 1]
    assert [item["type"] for item in stream[-1]["response"]["output"]] == ["reasoning", "message"]
    again = [{"role": "user", "content": "red?"}, *reply["output"], {"role": "user", "content": "sure?"}]
    assert post(served, "/v1/responses", **body | {"input": again}).status == 200


def test_the_fields_are_refused_by_name(served: Served, tiny_bundle: Path) -> None:
    assert served.chat(asking(user("red?"), chat_template_kwargs={"documents": []})).status == 400
    for path, body, param in (
        ("/v1/chat/completions", asking(user("red?"), chat_template_kwargs=ON), "reasoning_effort"),
        ("/v1/chat/completions", asking(user("red?"), max_thinking_tokens=0), "max_thinking_tokens"),
    ):
        if param == "max_thinking_tokens":
            reply = post(served, path, **body)
        else:
            with serving({"tiny": tiny_bundle}) as plain:
                reply = post(plain, path, **body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
