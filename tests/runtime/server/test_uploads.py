"""Bodies on their way: those that do not arrive hold up nobody, and memory for them is bounded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.serving import WAIT, Served, asking, serving, until, user
from vtx.runtime.server.keys import Keys, read_keys
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.uploads import FREE_BYTES, Uploads, network_of

BODY = 1 << 20
SLACK = 64 << 20  # of the process, next to the bodies


@contextmanager
def unfinished(served: Served, number: int, length: int, part: bytes, key: str = "") -> Iterator[list[socket.socket]]:
    """Requests whose bodies do not arrive whole."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    with ExitStack() as closing:
        connections = list[socket.socket]()
        for _ in range(number):
            connections.append(closing.enter_context(socket.create_connection(("127.0.0.1", served.port), WAIT)))
            connections[-1].sendall(head.encode() + part)
        yield connections


def test_bodies_that_do_not_arrive_take_nobodys_place(tiny_bundle: Path) -> None:
    limits = Limits(parallel=1, queue=1)
    with serving({"tiny": tiny_bundle}, limits) as served, unfinished(served, 50, 1000, b"{") as connections:
        assert [served.chat(asking(user("red?"))).status for _ in range(3)] == [200, 200, 200]
        assert served.request("GET", "/livez").status == 200
        connections[0].settimeout(0.1)
        with pytest.raises(TimeoutError):
            connections[0].recv(1)


def test_a_body_that_does_not_arrive_within_the_limit_ends(tiny_bundle: Path) -> None:
    limits, answer = Limits(body_seconds=0.2), b""
    with serving({"tiny": tiny_bundle}, limits) as served, unfinished(served, 1, 1000, b"{") as [connection]:
        while b"did not arrive within 0.2 s" not in answer:
            part = connection.recv(4096)
            assert part, answer
            answer += part
    assert b" 408 " in answer


def test_of_too_many_bodies_on_their_way_the_oldest_end(tiny_bundle: Path) -> None:
    most, more = 3, 2
    with serving({"tiny": tiny_bundle}, Limits(client_uploads=most)) as served, ExitStack() as closing:
        connections = list[socket.socket]()
        for number in range(most + more):
            connections += closing.enter_context(unfinished(served, 1, 1000, b"{"))
            uploads = min(number + 1, most)
            until(lambda: served.metrics()["vtx_body_bytes"] == uploads, "it is on its way")  # noqa: B023 - at once
        for connection in connections[:more]:
            assert b" 408 " in connection.recv(4096)
        for connection in connections[more:]:
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)


def test_a_client_has_a_number_of_bodies_and_others_have_theirs() -> None:
    limits = Limits()
    uploads = Uploads(limits)
    with ExitStack() as bodies:
        for _ in range(limits.client_uploads):
            bodies.enter_context(uploads.begin("one"))
        with pytest.raises(Refusal, match=f"{limits.client_uploads} bodies of requests are being read"):
            bodies.enter_context(uploads.begin("one"))
        bodies.enter_context(uploads.begin("another"))


def test_the_bodies_of_one_client_leave_room_for_anothers(tiny_bundle: Path) -> None:
    """By number and by bytes; a small body needs no room at all."""
    limits = Limits(body=BODY, bodies=4)
    keys = Keys(read_keys("a key-a\nb key-b\nm key-m metrics", "keys"))
    with serving({"tiny": tiny_bundle}, limits, api_keys=keys) as served:

        def held() -> float:
            text = served.request("GET", "/metrics", authorization="Bearer key-m").body.decode()
            return float(text.partition("\nvtx_body_bytes ")[2].partition("\n")[0])

        with unfinished(served, 8, BODY, b" " * (BODY - 1), "key-a"):
            until(lambda: held() >= 2 * (BODY - 1), "they have arrived as far as there is room")
            assert held() <= 2 * BODY, "half of the room"
            small = asking(user("red?"))
            assert served.chat(small, authorization="Bearer key-a").status == 200
            large = {**small, "user": "x" * (BODY - 1000)}
            assert served.chat(large, authorization="Bearer key-b").status == 200
            refused = served.chat(large, authorization="Bearer key-a")
            assert (refused.status, refused.json["error"]["code"]) == (429, "uploads_full")
            assert int(refused.headers["retry-after"]) > 0
        until(lambda: held() == 0, "the room is free again")
        assert served.chat(large, authorization="Bearer key-a").status == 200
    assert FREE_BYTES < BODY


@pytest.mark.slow
def test_aborted_uploads_leave_no_memory(tiny_bundle: Path) -> None:
    """Nor what the allocator would keep of them: over 200 MiB, of bodies of 20 MB."""
    process, size = psutil.Process(os.getpid()), 20_000_000
    limits = Limits()
    with serving({"tiny": tiny_bundle}, limits) as served:
        assert served.chat(asking(user("red?"))).status == 200
        before = process.memory_info().rss
        for _ in range(3):
            with unfinished(served, 16, size + 1, b" " * size):
                assert process.memory_info().rss - before < limits.bodies * limits.body + 4 * SLACK
        until(lambda: served.metrics()["vtx_body_bytes"] == 0, "they are forgotten")
        until(lambda: process.memory_info().rss - before < 2 * SLACK, "their memory is the system's again")


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "::ffff:c000:207"), ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::9%eth0", "2001:db8::/64"), ("unix", "unix"), ("", ""),
    ],
)  # fmt: skip
def test_a_client_is_an_address_or_its_network(address: str, client: str) -> None:
    assert network_of(address) in (client, "::ffff:192.0.2.7" if "ffff" in address else client)
