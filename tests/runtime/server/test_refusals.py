"""What a server refuses, and that refusing costs nobody else anything."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import WAIT, Served, asking, data_url, held, serving, until, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.scheduler.engine import AnswerRequest, Engine
from vtx.runtime.server.endpoints import prepare
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai.request import read_request

IMAGE = random_image(1)
LIMITS = Limits(body=60_000, pixels=10_000, images=2, new_tokens=200)
GOOD = asking(user("red?"))


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}, LIMITS) as served:
        yield served


def part(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": "red?"}]}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "other"}, 404, "model", "this server has tiny"),
        ({"messages": []}, 400, "messages", "must be a list"),
        ({"messages": [{"role": "assistant", "content": "red"}]}, 400, "messages", "the user's question"),
        ({"messages": [{"role": "tools", "content": "red"}]}, 400, "messages", "must be system, developer"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", "must be a string or a list"),
        ({"messages": [user("  ")]}, 400, None, "the question is empty"),
        ({"messages": [part({"url": "http://127.0.0.1/a.png"})]}, 400, "messages", "fetches no addresses"),
        ({"messages": [part({"url": "file:///etc/passwd"})]}, 400, "messages", "opens no files"),
        ({"messages": [part("/etc/passwd")]}, 400, "messages", "opens no files"),
        ({"messages": [part({"url": "data:text/plain;base64,aGk="})]}, 400, "messages", "not an image"),
        ({"messages": [part({"url": "data:image/png;base64,aGk="})]}, 400, "messages", "image"),
        ({"messages": [user("red?", IMAGE, IMAGE, IMAGE)]}, 413, "messages", "3 images and videos are given"),
        ({"messages": [user("red?", random_image(1, (101, 100)))]}, 413, "messages", "101x100 pixels"),
        ({"messages": [user("red " * 400)]}, 400, "messages", "fit into this bundle"),
        ({"k": 4}, 400, None, "K = 4 was not prebuilt"),
        ({"k": 3.5}, 400, "k", "must be a whole number"),
        ({"k": "auto"}, 400, None, "needs gates"),
        ({"reduce": "nothing-such"}, 400, None, "nothing-such"),
        ({"gate_threshold": 2}, 400, "gate_threshold", "from 0 to 1"),
        ({"rest": "110%"}, 400, "rest", "at most 100%"),
        ({"rest": True}, 400, "rest", "rest is True"),
        ({"k": "none", "rest": "10%"}, 400, None, "give K as a number"),
        ({"temperature": "hot"}, 400, "temperature", "temperature"),
        ({"top_p": 0}, 400, "top_p", "top-p is 0"),
        ({"seed": -1}, 400, "seed", "seed"),
        ({"stop": [""]}, 400, "stop", "stop"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"stream": 1}, 400, "stream", "true or false"),
        ({"n": 5}, 400, "n", "at most 4"),
        ({"n": 0}, 400, "n", "at least 1"),
        ({"n": True}, 400, "n", "whole number"),
        ({"min_p": 2}, 400, "min_p", "from 0 to 1"),
        ({"presence_penalty": 3}, 400, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": "a"}, 400, "frequency_penalty", "must be a number"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {str(n): 0 for n in range(1025)}}, 400, "logit_bias", "at most 1024"),
        ({"logit_bias": [1]}, 400, "logit_bias", "must be an object"),
        ({"logit_bias": {"99999999": 1}}, 400, None, "names token 99999999"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "has no function"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "ask for logprobs, too"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "20"),
        ({"top_logprobs": True, "logprobs": True}, 400, "top_logprobs", "whole number"),
        ({"temprature": 1}, 400, "temprature", "there is no field 'temprature'"),
    ],
)
def test_what_is_wrong_is_named_in_openais_form(
    served: Served, change: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    response = served.chat({**GOOD, **change})
    assert response.status == status
    error = response.json["error"]
    assert said in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert served.chat({**GOOD, "stream": True, **change}).status == status, "before any event"


@pytest.mark.slow
def test_what_is_at_a_limit_is_answered(served: Served) -> None:
    images = [random_image(seed, (20, 20)) for seed in range(LIMITS.images)]
    for message in (user("red?", *images), user("red?", random_image(1, (100, 100)))):
        assert served.chat(asking(message, max_tokens=LIMITS.new_tokens)).status == 200


def test_stream_options_are_for_streams(served: Served) -> None:
    response = served.chat({**GOOD, "stream_options": {"include_usage": True}})
    assert (response.status, response.json["error"]["param"]) == (400, "stream_options")


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "tools": [], "logit_bias": None}
    assert served.chat({**GOOD, **neutral, "response_format": {"type": "text"}}).status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 5000, b'{"a":1,"a":2}', b'"\\ud800"']
)
def test_what_is_not_json_is_refused(served: Served, body: bytes) -> None:
    response = served.chat(body)
    assert response.status == 400
    assert response.json["error"]["type"] == "invalid_request_error"


def test_a_body_must_say_that_it_is_json(served: Served) -> None:
    """A page of another site can send text to this machine without asking first, but no JSON, nor hide its origin."""
    assert served.chat(GOOD, content_type="text/plain").status == 415
    body = json.dumps(GOOD).encode()
    for headers, status in (({"origin": "http://example.org"}, 415), ({"origin": "null"}, 415), ({}, 200)):
        assert served.request("POST", "/v1/chat/completions", body, **headers).status == status


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("GZIP, identity", 415), ("identity", 200), ("", 200)])
def test_a_compressed_body_is_refused(served: Served, coding: str, status: int) -> None:
    response = served.chat(GOOD, content_encoding=coding)
    assert response.status == status
    assert status == 200 or "Content-Encoding" in response.json["error"]["message"]


def test_a_body_beyond_the_limit_is_refused_also_without_a_length(served: Served) -> None:
    body = json.dumps(asking(user("x" * 70_000))).encode()
    assert served.chat(body).status == 413
    with socket.create_connection(("127.0.0.1", served.port), WAIT) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert b" 413 " in connection.recv(100)


def test_other_addresses_and_methods_are_told_what_there_is(served: Served) -> None:
    assert served.request("GET", "/v1/nothing").status == 404
    assert served.request("GET", "/v1/chat/completions").status == 405
    assert "POST /v1/chat/completions" in served.request("GET", "/v1/nothing").json["error"]["message"]


@pytest.mark.slow
def test_mutilated_bodies_end_in_an_answer_or_a_refusal_and_harm_nobody(served: Served) -> None:
    expected = served.chat(GOOD).json["choices"][0]["message"]["content"]
    draw = random.Random(0)
    whole = json.dumps(asking(user("red?", random_image(3)), k=3, stop=["x"], temperature=0.5)).encode()
    statuses = set()
    for _ in range(150):
        body = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(body))
            match draw.randrange(3):
                case 0:
                    body[at] = draw.randrange(256)
                case 1:
                    del body[at : at + draw.randint(1, 40)]
                case _:
                    body[at:at] = draw.choice([b"null", b"{}", b"[", b'"', b"1e999", b"-1", b"true", b","])
        statuses.add(served.chat(bytes(body)).status)
    assert statuses <= {200, 400, 404, 413}
    assert 400 in statuses
    assert served.chat(GOOD).json["choices"][0]["message"]["content"] == expected


@pytest.mark.sampled
@pytest.mark.parametrize("value", [None, True, 0, -1, 1.5, "", "x", [], {}, [None], {"a": None}, 10**400])
def test_no_value_of_any_field_ends_in_an_error_of_the_server(served: Served, value: Any) -> None:
    names = ["model", "messages", "k", "reduce", "gate_threshold", "temperature", "top_p", "top_k", "seed", "stop",
             "stream", "logprobs", "top_logprobs", "max_tokens", "stream_options", "n", "repetition_penalty",
             "ignore_eos", "reuse", "about", "rest"]  # fmt: skip
    bodies = [{**GOOD, name: value} for name in names]
    bodies += [
        asking({"role": "user", "content": value}),
        asking({"role": "user", "content": [value]}),
        asking(part(value)),
    ]
    for body in bodies:
        assert served.chat(body).status in (200, 400, 404), body


# --- who may ask ----------------------------------------------------------------------------------


def test_with_a_key_nothing_is_answered_without_it(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["secret"]) as served:
        for value in ("", "Bearer wrong", "secret", "Bearer ", "Bearer secre", "Bearer secrets"):
            headers = {"authorization": value} if value else {}
            response = served.chat(GOOD, **headers)
            assert (response.status, response.json["error"]["code"]) == (401, "invalid_api_key")
            assert served.request("GET", "/metrics", **headers).status == 401
            assert served.request("GET", "/v1/models", **headers).status == 401
        assert served.chat(GOOD, authorization="Bearer secret").status == 200
        assert served.request("GET", "/health").status == 200


def test_a_host_that_is_not_this_machine_is_refused_unless_served_to_others(served: Served, tiny_bundle: Path) -> None:
    """A name that an attacker points at this machine makes a browser ask it for their page."""
    assert served.request("GET", "/v1/models", host="evil.example").status == 421
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert served.request("GET", "/v1/models", host=host).status == 200
    with serving({"tiny": tiny_bundle}, local_hosts=False) as open_served:
        assert open_served.request("GET", "/v1/models", host="vtx.example").status == 200


# --- full, slow and gone --------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back(tiny_bundle: Path) -> None:
    limits = Limits(parallel=1, queue=1)
    body = asking(user("red?"), max_tokens=200, stream=True)
    with serving({"tiny": tiny_bundle}, limits) as served:
        with held(served), served.open_chat(body), served.open_chat(body):
            until(lambda: served.metrics()["vtx_requests_waiting"] == 1, "the second request waits")
            response = served.chat(GOOD)
        assert response.status == 429
        assert int(response.headers["retry-after"]) > 0
        assert response.json["error"]["code"] == "queue_full"
        served.until_active(0, "both have ended")
        assert served.chat(GOOD).status == 200


def test_an_answer_that_takes_too_long_is_ended(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, Limits(seconds=0.05)) as served:
        response = served.chat(asking(user("red?"), max_tokens=230))
        if response.status == 408:  # a machine so busy that the first token did not come in time
            assert "no answer after 0.05 s" in response.json["error"]["message"]
            assert response.headers["x-should-retry"] == "false"
        else:
            assert response.json["choices"][0]["finish_reason"] == "length"
            assert response.json["usage"]["vtx"]["stopped"] == "timeout"
            assert 0 < response.json["usage"]["completion_tokens"] < 230
        served.until_active(0, "the answer ends")


def test_a_request_that_waits_is_ended_at_its_limit_too(tiny_bundle: Path) -> None:
    """While another one, which does not end, is computed."""
    long = asking(user("red?"), max_tokens=200, stream=True)
    with (
        serving({"tiny": tiny_bundle}, Limits(parallel=1, seconds=1.5)) as served, held(served), served.open_chat(long)
    ):  # fmt: skip
        served.until_active(1, "the first answer begins")
        for stream in (False, True):
            response = served.chat({**GOOD, "stream": stream})
            assert response.status == 408
            assert "1.5 s" in response.json["error"]["message"]
        assert served.metrics()["vtx_requests_active"] == 1


def test_the_time_that_a_request_waited_counts(tiny_bundle: Path, local: Model) -> None:
    """An answer that begins late has only what is left."""
    limits = Limits(seconds=100)
    engine = Engine("tiny", local, limits)
    try:
        asked = prepare(engine, read_request(json.dumps(GOOD).encode(), limits), limits, lambda: False)
        begun: list[float | None] = []
        for left in (30.0, -5.0):
            request = AnswerRequest(asked.images, asked.chat.messages, asked.ids[0], asked.chat.settings())
            job = engine.job(request, lambda _: None, ends_at=time.monotonic() + left)
            assert job.begin(lambda: None, time.monotonic())
            stream: Any = job.stream
            begun.append(stream.timeout)
            job.abandon()
    finally:
        engine.scheduler.close()
    assert begun[0] is not None
    assert 0 < begun[0] <= 30
    assert begun[1] == 1e-3, "and none is left"


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(tiny_bundle: Path, stream: bool) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        with held(served):
            counted = served.metrics()["vtx_completion_tokens_total"]
            connection = served.open_chat(asking(user("red?"), max_tokens=230, stream=stream))
            served.until_active(1, "the answer begins")
            connection.close()
            until(lambda: served.metrics()["vtx_cancelled_total"] == 1, "the answer is cancelled")
        served.until_active(0, "the engine is free")
        assert served.metrics()["vtx_completion_tokens_total"] == counted
        assert served.chat(GOOD).status == 200


def test_a_client_that_leaves_while_it_waits_is_not_computed(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, Limits(parallel=1)) as served:
        with held(served), served.open_chat(asking(user("red?"), max_tokens=200, stream=True)):
            served.until_active(1, "the first answer begins")
            served.open_chat(asking(user("which?"), max_tokens=200)).close()
            until(lambda: served.metrics()["vtx_cancelled_total"] == 1, "the one that waits is cancelled")
        served.until_active(0, "both have ended")
        assert served.chat(GOOD).status == 200


def test_a_failing_engine_harms_only_the_request_that_met_it(tiny_bundle: Path, monkeypatch: Any) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        expected = served.chat(GOOD).json["choices"][0]["message"]["content"]
        backend = served.engines.loaded[0].model.backend

        def broken(*_: Any) -> None:
            raise RuntimeError("the secret of this machine")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "head", broken)
            response = served.chat(GOOD)
        assert response.status == 500
        assert "secret" not in response.body.decode()
        assert served.chat(GOOD).json["choices"][0]["message"]["content"] == expected


def test_an_image_whose_size_is_a_lie_is_refused(served: Served) -> None:
    url = data_url(IMAGE)
    broken = url[:60] + "AAAA" + url[64:]
    assert served.chat({**GOOD, "messages": [part({"url": broken})]}).status == 400


def test_a_header_beyond_its_limit_is_431_however_it_comes(served: Served) -> None:
    for size, status in ((15_000, b" 200 "), (17_000, b" 431 "), (60_000, b" 431 "), (200_000, b" 431 ")):
        head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: " + size * b"x" + b"\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), WAIT) as connection:
            connection.sendall(head)
            assert status in connection.recv(100), size


def test_no_message_holds_an_address_in_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow names the file that it cannot identify by its place in memory."""

    def unidentified(file: Any, *_: Any, **__: Any) -> None:
        raise OSError(f"cannot identify image file {file!r}")

    monkeypatch.setattr("PIL.Image.open", unidentified)
    message = served.chat(asking(user("red?", random_image(99)))).json["error"]["message"]
    assert "cannot identify image file" in message
    assert "0x" not in message
