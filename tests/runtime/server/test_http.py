"""Bodies and replies where the other side is slow, or lies about its size."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from vtx.runtime.server.http import ClientLeft, Reply, read_json_body
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal

SCOPE: MutableMapping[str, Any] = {"headers": [(b"content-type", b"application/json; charset=utf-8")]}


def read(limit: int, *messages: dict[str, Any]) -> bytes:
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(waiting)

    return asyncio.run(read_json_body(SCOPE, receive, Limits(body=limit)))


def piece(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_pieces_is_put_together() -> None:
    assert read(4, piece(b"ab"), piece(b"c"), piece(b"d", more=False)) == b"abcd"


def test_a_body_without_an_end_is_read_to_twice_the_limit_and_no_further() -> None:
    with pytest.raises(Refusal) as refused:
        read(4, *[piece(b"abc")] * 3)  # a fourth read would end the iterator
    assert refused.value.status == 413


def test_a_client_that_leaves_within_its_body_is_known_to_have_left() -> None:
    with pytest.raises(ClientLeft):
        read(4, piece(b"a"), {"type": "http.disconnect"})


@pytest.mark.parametrize("error", [None, BrokenPipeError])
def test_a_client_that_takes_nothing_more_has_left(error: type[Exception] | None) -> None:
    async def send(_: Any) -> None:
        if error is not None:
            raise error
        await asyncio.Event().wait()

    async def reply() -> None:
        await Reply(send, Limits(write_seconds=0.01)).event({"text": "red"})

    with pytest.raises(ClientLeft):
        asyncio.run(reply())
