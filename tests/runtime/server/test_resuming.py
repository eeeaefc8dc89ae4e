"""A stream that broke off is taken up again by its tenant, whole and only for a while."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import WAIT, Response, Served, asking, serving, until, user
from tests.support.tiny import random_image
from vtx.runtime.server.http import ClientLeft
from vtx.runtime.server.keys import SCOPE, Keys, Tenant, read_keys
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.resuming import MAX_ENDED, RecordedReply, Resumable

QUESTION = asking(user("red?", random_image(1)), k="none", reduce="none", max_tokens=60, stream=True)
ALICE = {"authorization": "Bearer key-of-alice"}
BOB = {"authorization": "Bearer key-of-bob"}
ASKED = {"x_resumable": "1", **ALICE}
IDS = re.compile(rb"id: ([0-9a-f]{32}-\d+)\n")


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    keys = Keys(read_keys("alice key-of-alice\nbob key-of-bob", "keys"))
    with serving({"tiny": tiny_bundle}, Limits(resume_seconds=5), api_keys=keys) as served:
        yield served


def texts(body: bytes) -> str:
    """The text of the events of a part of a stream."""
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def broken_off(served: Served, events: int) -> bytes:
    """What arrived of a stream whose client leaves after so many events."""
    head = {name.replace("_", "-"): value for name, value in ASKED.items()}
    with served.open_chat(QUESTION, **head) as connection:
        reply = b""
        while len(IDS.findall(reply)) < events:
            reply += connection.recv(1 << 16)
    return reply


def resumed(served: Served, last: str, **headers: str) -> Response:
    return served.chat({}, last_event_id=last, **headers)


def test_a_stream_goes_on_where_its_connection_broke_off(served: Served) -> None:
    whole = served.chat(QUESTION, **ALICE).text
    begun = broken_off(served, 3)
    last = IDS.findall(begun)[2].decode()
    rest = resumed(served, last, **ALICE)
    assert rest.status == 200
    assert rest.headers["content-type"].startswith("text/event-stream")
    first = begun[: begun.index(last.encode())] + begun[begun.index(last.encode()) :].partition(b"\n\n")[0]
    assert texts(first) + texts(rest.body) == whole
    assert rest.body.endswith(b"data: [DONE]\n\n")
    numbers = [int(id.rpartition(b"-")[2]) for id in IDS.findall(rest.body)]
    assert numbers[0] > int(last.rpartition("-")[2])
    assert numbers == sorted(set(numbers))
    again = resumed(served, last, **ALICE)
    assert again.body == rest.body, "it is kept after its end"


def test_another_key_gets_nothing_of_it(served: Served) -> None:
    last = IDS.findall(broken_off(served, 1))[0].decode()
    assert resumed(served, last, **BOB).json["error"]["code"] == "stream_not_found"
    assert resumed(served, last).status == 401
    assert resumed(served, last, **ALICE).status == 200


@pytest.mark.parametrize("change", ["x", "-", "9" * 5000, "-²", "-99999"])
def test_ids_of_no_event_are_refused(served: Served, change: str) -> None:
    last = IDS.findall(broken_off(served, 1))[0].decode().rpartition("-")[0] + change
    refused = resumed(served, last, **ALICE)
    assert (refused.status, refused.json["error"]["code"]) == (404, "stream_not_found")


@pytest.mark.slow
def test_what_is_no_stream_of_events_has_no_ids_and_ends_with_its_connection(served: Served) -> None:
    whole = served.chat({**QUESTION, "stream": False}, **ASKED)
    assert (whole.status, b"id: " in whole.body) == (200, False)
    refused = served.chat({**QUESTION, "k": 77}, **ASKED)
    assert (refused.status, b"id: " in refused.body) == (400, False)
    assert b"id: " not in served.chat(QUESTION, **ALICE).body, "only where a request asks for it"
    unread = served.request("POST", "/v1/chat/completions", b"{}", content_type="text/plain", **ASKED)
    assert unread.status == 415
    begun = {**QUESTION, "stream": False, "max_tokens": 200}
    with served.open_chat(begun, **{name.replace("_", "-"): value for name, value in ASKED.items()}):
        until(lambda: served.engines.loaded[0].scheduler.active == 1, "it is computed")
    until(lambda: served.engines.loaded[0].scheduler.active == 0, "it ends with its connection")


@pytest.mark.slow
def test_an_answer_that_nobody_takes_up_again_ends(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, Limits(resume_seconds=0.2, new_tokens=500)) as served:
        scheduler = None
        body = {**QUESTION, "max_tokens": 400}
        with served.open_chat(body, **{"x-resumable": "1"}) as connection:
            reply = connection.recv(1 << 16)
            while not IDS.search(reply):
                reply += connection.recv(1 << 16)
            scheduler = served.engines.loaded[0].scheduler
        until(lambda: scheduler.active == 0, "it ends")
        last = IDS.findall(reply)[0].decode()
        until(lambda: resumed(served, last).status == 404, "nothing of it is kept")


def test_a_second_connection_takes_the_place_of_the_first(served: Served) -> None:
    head = {name.replace("_", "-"): value for name, value in ASKED.items()}
    with served.open_chat({**QUESTION, "max_tokens": 150}, **head) as connection:
        reply = connection.recv(1 << 16)
        while not IDS.search(reply):
            reply += connection.recv(1 << 16)
        rest = resumed(served, IDS.findall(reply)[0].decode(), **ALICE)
        assert rest.body.endswith(b"data: [DONE]\n\n")
        connection.settimeout(WAIT)
        while part := _received(connection):
            reply += part
    assert b"[DONE]" not in reply or reply.endswith(b"0\r\n\r\n"), "the first ended"


def _received(connection: socket.socket) -> bytes:
    part = connection.recv(1 << 16)
    return b"" if part.endswith(b"0\r\n\r\n") else part


# ---- without a server ----------------------------------------------------------------------------

BEGIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def part(body: bytes, *, more: bool = True) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def test_a_stream_holds_no_more_than_its_limit_and_breaks_off_there() -> None:
    async def fill() -> tuple[int, list[bytes]]:
        stream = RecordedReply("alice", 1000)
        got = list[bytes]()
        count = 0

        async def send(message: MutableMapping[str, Any]) -> None:
            got.append(message.get("body", b""))

        await stream.put(BEGIN)
        with suppress(ClientLeft):
            while True:
                await stream.put(part(b"data: x\n\n"))
                count += 1
        stream.ended = True
        await stream.follow(send, 0, 10, 5)
        return count, got

    count, got = asyncio.run(fill())
    assert count == 1000 // len(b"data: x\n\n")
    assert [int(body.partition(b"\n")[0].rpartition(b"-")[2]) for body in got if body] == list(range(11, count + 1))


def test_streams_that_have_ended_are_bounded_and_a_flood_drops_its_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(BEGIN)
        await send(part(b"data: x\n\n"))
        await send(part(b"data: y\n\n", more=False))

    async def ask(resumable: Resumable, tenant: str, last: str = "") -> bytes:
        got = list[bytes]()
        sent = asyncio.Event()
        headers = [(b"last-event-id", last.encode())] if last else [(b"x-resumable", b"1")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}

        async def receive() -> MutableMapping[str, Any]:
            if sent.is_set():
                await asyncio.Future()
            sent.set()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            got.append(message.get("body", b""))

        await resumable({**scope, SCOPE: Tenant(tenant, tenant)}, receive, send)
        return b"".join(got)

    def first(body: bytes) -> str:
        return body.partition(b"\n")[0].removeprefix(b"id: ").decode()

    async def flood() -> None:
        resumable = Resumable(app, Limits())
        rare = first(await ask(resumable, "alice"))
        events = [first(await ask(resumable, "bob")) for _ in range(MAX_ENDED + 10)]
        kept = [b"data: y" in await ask(resumable, "bob", event) for event in events]
        assert kept == [False] * 11 + [True] * (MAX_ENDED - 1), "the oldest of bob's have gone"
        assert b"data: y" in await ask(resumable, "alice", rare)
        assert b"data: y" not in await ask(resumable, "bob", rare)

    asyncio.run(flood())
