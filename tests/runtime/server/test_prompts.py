"""Lists of prompts, token ids in both directions, counts, times, further names of addresses and bundles, thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.calling import THINKING, TOOLS, calling_bundle
from tests.support.serving import Response, Served, asking, serving, user
from tests.support.tiny import random_image
from vtx.commands.serve import aliases_of
from vtx.runtime.api.model import Model
from vtx.runtime.errors import RequestError
from vtx.runtime.server.engines import Engines, Serving
from vtx.runtime.server.keys import Keys, read_keys
from vtx.runtime.server.limits import Limits

openai = pytest.importorskip("openai", reason="needs the openai package, of the extra dev")
PROMPTS = ("USER: red? ASSISTANT:", "USER: is it blue? ASSISTANT:")
PLAIN: dict[str, Any] = {"k": "none", "reduce": "none", "ignore_eos": True}
EIGHT: dict[str, Any] = {"model": "tiny", "max_tokens": 8, **PLAIN}


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def thinking(packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving({"tiny": calling_bundle(tmp_path_factory.mktemp("thinking"), THINKING)}) as served:
        yield served


def post(served: Served, path: str, body: Any, **headers: str) -> Response:
    return served.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)


@pytest.mark.slow
def test_each_prompt_of_a_list_has_the_answers_that_it_has_alone(client: Any) -> None:
    asked = {"model": "tiny", "max_tokens": 8, "n": 2, "seed": 4, "temperature": 1.0, "extra_body": PLAIN}
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in PROMPTS]
    together = client.completions.create(prompt=list(PROMPTS), **asked)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [choice.text for one in alone for choice in one.choices]
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert together.usage.completion_tokens == 32
    chunks = list(client.completions.create(prompt=list(PROMPTS), stream=True, **asked))
    texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) for index in range(4)]
    assert texts == [choice.text for choice in together.choices]


def test_a_prompt_of_token_ids_has_the_answer_of_its_text(client: Any, served: Served) -> None:
    ids = [post(served, "/tokenize", {"prompt": prompt}).json["tokens"] for prompt in PROMPTS]
    asked = {"model": "tiny", "max_tokens": 8, "logprobs": 1, "extra_body": PLAIN}
    texts = client.completions.create(prompt=list(PROMPTS), **asked).choices
    assert [choice.text for choice in client.completions.create(prompt=ids, **asked).choices] == [
        choice.text for choice in texts
    ]
    [single], [alone] = (client.completions.create(prompt=one, **asked).choices for one in (ids[1], PROMPTS[1]))
    assert (single.text, single.logprobs) == (alone.text, alone.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_stands_before_its_answers(served: Served, stream: bool) -> None:
    body = {**EIGHT, "prompt": list(PROMPTS), "stream": stream}
    replies = [post(served, "/v1/completions", {**body, "echo": echo}) for echo in (False, True)]
    texts = [
        ["".join(c["text"] for event in events for c in event["choices"] if c["index"] == index) for index in (0, 1)]
        for events in (reply.events if stream else [reply.json] for reply in replies)
    ]
    assert texts[1] == [prompt + text for prompt, text in zip(PROMPTS, texts[0], strict=True)]


def test_detokenized_tokens_are_the_text_that_was_tokenized(served: Served, local: Model) -> None:
    text = "USER: red?</s> and blue?"
    tokens = post(served, "/tokenize", {"prompt": text}).json["tokens"]
    reply = post(served, "/detokenize", {"tokens": tokens}).json
    assert reply["prompt"] == reply["content"] == local.loaded.text.tokenizer.decode(tokens, skip_special_tokens=False)
    assert "USER: red?</s>" in reply["prompt"]
    assert post(served, "/detokenize", {"tokens": []}).json["prompt"] == ""
    image = local.manifest.text.image_token_id
    assert post(served, "/v1/completions", {**EIGHT, "prompt": [*tokens, image]}).status == 400


def test_input_tokens_are_those_of_the_answer(client: Any, served: Served) -> None:
    body = asking(user("red?", random_image(1)), **PLAIN)
    tokens = served.chat(body).json["usage"]["prompt_tokens"]
    reply = {"object": "response.input_tokens", "input_tokens": tokens}
    assert post(served, "/v1/chat/completions/input_tokens", body).json == reply
    asked = [{"role": "user", "content": "red?"}]
    counted = client.responses.input_tokens.count(model="tiny", input=asked).input_tokens
    assert counted == served.chat({**EIGHT, "messages": asked}).json["usage"]["prompt_tokens"]


def test_a_prompt_that_is_too_long_is_told_with_its_tokens_and_the_context_s(served: Served, local: Model) -> None:
    most = local.manifest.max_context
    for path, body in (
        ("/v1/completions", {**EIGHT, "prompt": [5] * (most + 7)}),
        ("/v1/completions", {**EIGHT, "prompt": [PROMPTS[0], [5] * (most + 7)]}),
    ):
        error = post(served, path, body).json["error"]
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (most + 7, most)
        assert error["code"] == "context_length_exceeded"
        assert f"takes {most + 7} tokens" in error["message"]
        assert f"{most - 1} fit" in error["message"]


def test_times_are_told_on_request(served: Served) -> None:
    body = asking(user("red?", random_image(1)), **PLAIN, timings_per_token=True)
    whole = served.chat(body).json
    times, usage = whole["timings"], whole["usage"]
    assert times["prompt_n"] + times["cache_n"] == usage["prompt_tokens"]
    assert (times["predicted_n"], times["prompt_ms"]) == (8, usage["vtx"]["timings_ms"]["first_token"])
    assert times["predicted_ms"] == pytest.approx(7 * usage["vtx"]["timings_ms"]["decode_per_token"])
    *_, last = served.chat({**body, "stream": True}).events
    assert last["timings"]["predicted_n"] == 8
    assert "timings" not in served.chat(asking(user("red?"), **PLAIN)).json
    several = post(served, "/v1/completions", {**EIGHT, "prompt": list(PROMPTS), "timings_per_token": True}).json
    assert [one["predicted_n"] for one in several["timings"]] == [8, 8]
    refused = post(served, "/v1/responses", {"input": "red?", "timings_per_token": True})
    assert (refused.status, refused.json["error"]["param"]) == (400, "timings_per_token")


def test_addresses_are_there_without_their_version(served: Served) -> None:
    body = asking(user("red?"), **PLAIN)
    message = served.chat(body).json["choices"][0]["message"]
    assert post(served, "/chat/completions", body).json["choices"][0]["message"] == message
    assert served.request("GET", "/models").json == served.request("GET", "/v1/models").json
    assert served.request("GET", "/models/tiny").json["id"] == "tiny"
    wrong = post(served, "/messages", {"messages": []})
    assert (wrong.status, wrong.json["type"]) == (400, "error")
    assert served.request("GET", "/other").status == served.request("GET", "/v2/models").status == 404


def test_a_key_is_needed_without_the_version_too(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["secret"]) as served:
        assert served.request("GET", "/models").status == 401
        assert served.request("GET", "/models", x_api_key="secret").status == 200


def test_an_alias_means_its_bundle_and_is_listed(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, aliases={"gpt-4o": "tiny"}) as served:
        assert served.chat({**asking(user("red?")), "model": "gpt-4o"}).json["model"] == "tiny"
        assert served.chat({**asking(user("red?")), "model": "gpt-4o:latest"}).status == 200
        listed = served.request("GET", "/v1/models").json["data"]
        assert [(model["id"], model["root"]) for model in listed] == [("tiny", "tiny"), ("gpt-4o", "tiny")]
        assert "gpt-4o" in served.chat({**asking(user("red?")), "model": "x"}).json["error"]["message"]


@pytest.mark.parametrize("aliases", [{"tiny": "tiny"}, {"a": "other"}])
def test_an_alias_of_no_bundle_or_with_a_bundle_s_name_is_refused(tiny_bundle: Path, aliases: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="alias"):
        Engines({"tiny": tiny_bundle}, lambda _: pytest.fail("loaded"), Limits(), serving=Serving(aliases=aliases))


@pytest.mark.parametrize("specs", [("a",), ("a=",), ("=b",), ("a=b", "a=c")])
def test_aliases_have_a_form(specs: tuple[str, ...]) -> None:
    assert aliases_of(("a=b", "c=b")) == {"a": "b", "c": "b"}
    with pytest.raises(RequestError, match="ALIAS=NAME"):
        aliases_of(specs)


@pytest.mark.slow
def test_a_key_asks_for_no_priority_above_its_own(tiny_bundle: Path) -> None:
    keys = Keys(read_keys("low k1 priority=0\nsome k2 priority=3\nany k3\n", "keys"))
    with serving({"tiny": tiny_bundle}, api_keys=keys) as served:
        for key, priority, status in (
            ("k1", 1, 403), ("k1", 0, 200), ("k1", -5, 200), ("k2", 3, 200), ("k2", 4, 403), ("k3", 10, 200),
        ):  # fmt: skip
            reply = served.chat(asking(user("red?"), priority=priority), x_api_key=key)
            assert reply.status == status
            if status == 403:
                error = reply.json["error"]
                assert (error["param"], error["code"]) == ("priority", "insufficient_permissions")
        assert served.chat(asking(user("red?")), x_api_key="k1").status == 200


@pytest.mark.parametrize("value", ["11", "-1", "x"])
def test_a_key_s_priority_has_limits(value: str) -> None:
    with pytest.raises(RequestError, match="keys line 1: priority must be a whole number from 0 to 10"):
        read_keys(f"a k1 priority={value}", "keys")


def prompt_of(served: Served, **fields: Any) -> str:
    """The end of the prompt that a request becomes."""
    tokens = post(served, "/tokenize", {"messages": [user("red?")], **fields}).json["tokens"]
    text: str = post(served, "/detokenize", {"tokens": tokens}).json["prompt"]
    return text.rpartition("assistant\n")[2]


def test_effort_switches_thoughts_where_the_template_has_a_switch(thinking: Served) -> None:
    assert prompt_of(thinking) == prompt_of(thinking, reasoning_effort="none") == "<think></think>\n"
    for effort in ("low", "medium", "high"):
        assert prompt_of(thinking, reasoning_effort=effort) == "<think>\n"
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    assert prompt_of(thinking, reasoning_effort="high", tools=TOOLS) == "<think>\n"
    counts = [
        post(thinking, "/v1/responses/input_tokens", {"input": "red?", "reasoning": {"effort": effort}}).json
        for effort in ("high", "none")
    ]
    assert counts[0]["input_tokens"] < counts[1]["input_tokens"]
    plain = served_tokens(thinking, {})
    assert served_tokens(thinking, {"reasoning_effort": "minimal"}) == plain
    assert served_tokens(thinking, {"reasoning_effort": "high"}) != plain


def served_tokens(served: Served, fields: dict[str, Any]) -> list[int]:
    reply: list[int] = served.chat(asking(user("red?"), **PLAIN, **fields)).json["usage"]["vtx"]["token_ids"]
    return reply


def test_effort_is_refused_by_name_without_a_switch(served: Served) -> None:
    for path, body, param in (
        ("/v1/chat/completions", asking(user("red?"), reasoning_effort="high"), "reasoning_effort"),
        ("/v1/responses", {"input": "red?", "reasoning": {"effort": "high"}}, "reasoning"),
        ("/v1/chat/completions", asking(user("red?"), reasoning_effort="huge"), "reasoning_effort"),
    ):
        reply = post(served, path, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
