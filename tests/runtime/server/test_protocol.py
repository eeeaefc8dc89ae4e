"""Connections that are slow, many, cut in tiny pieces or closed in half: peers in memory, and a clock that jumps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)

from uvicorn import Config  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from tests.support.clock import run  # noqa: E402
from vtx.runtime.server.protocol import (  # noqa: E402
    ARRIVAL_SECONDS,
    CONNECTIONS,
    MAX_IDLE,
    MAX_IDLE_PER_CLIENT,
    BoundedProtocol,
)

HEAD = b"POST /a HTTP/1.1\r\nHost: localhost\r\n"


class Peer(asyncio.Transport):
    """A client: what it got, and how its connection ended. One that `left` closes it at the second write, as TCP."""

    def __init__(self, server: Server, address: str) -> None:
        super().__init__()
        self.got = b""
        self.open, self.left = True, False
        self._address, self._refused = address, 0
        self.protocol = BoundedProtocol(server.config, server.state, {})
        self.protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if data:
            self.protocol.data_received(data)

    def half_close(self) -> None:
        if not self.protocol.eof_received():
            self.close()

    def leave(self) -> None:
        self.left = True
        self.half_close()

    def write(self, data: Any) -> None:
        self._refused += self.left
        if self._refused > 1:
            self._end(ConnectionResetError())
        elif not self.left:
            self.got += data

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.open:
            self.open = False
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def is_closing(self) -> bool:
        return not self.open

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self._address, 1), "sockname": ("127.0.0.1", 8000)}.get(name, default)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Server:
    """An application behind such connections. It answers with its request's body, once `ready` is set."""

    def __init__(self) -> None:
        self.config = Config(self._app, interface="asgi3", log_level="critical", ws="none", lifespan="off")
        self.state = ServerState()
        self.ready = asyncio.Event()
        self.left = 0

    def peer(self, address: str = "192.0.2.1") -> Peer:
        return Peer(self, address)

    async def _app(self, _: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        leaving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left += 1
            answering.cancel()
            return
        leaving.cancel()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def serve(test: Callable[[Server], Awaitable[None]]) -> None:
    """Run a test with a server whose event loop has a clock that jumps."""

    async def main() -> None:
        await test(Server())

    run(main())


def error(peer: Peer) -> str:
    """The message of an answer in OpenAI's form."""
    said: str = json.loads(peer.got.partition(b"\r\n\r\n")[2])["error"]["message"]
    return said


@pytest.mark.parametrize("pieces", [[b""], [b"P"], [b"POST", b" /a HTTP/1.1\r\n"], [HEAD, b"X", b": 1\r\n"]])
def test_a_connection_without_a_whole_header_ends_after_ten_seconds(pieces: list[bytes]) -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        for piece in pieces:
            peer.send(piece)
            await asyncio.sleep(3)  # whoever drips gets no more time
        await asyncio.sleep(9.9 - 3 * len(pieces))
        assert peer.open
        await asyncio.sleep(0.2)
        assert not peer.open
        assert b" 408 " in peer.got
        assert "within 10 s" in error(peer)

    serve(test)


def test_a_header_of_a_further_request_has_ten_seconds_too() -> None:
    async def test(server: Server) -> None:
        server.ready.set()
        peer = server.peer()
        for _ in range(2):
            peer.send(HEAD + b"Content-Length: 2\r\n\r\nab")
            await asyncio.sleep(4)
            assert peer.got.endswith(b"ab")
        peer.send(HEAD)
        await asyncio.sleep(9.9)
        assert peer.open
        await asyncio.sleep(0.2)
        assert not peer.open

    serve(test)


def test_a_request_that_takes_long_to_answer_is_not_ended_with_its_header() -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        peer.send(HEAD + b"Content-Length: 2\r\n\r\na")
        await asyncio.sleep(20)
        peer.send(b"b")
        await asyncio.sleep(20)
        server.ready.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert peer.got.endswith(b"ab")

    serve(test)


def test_a_body_that_nobody_reads_does_not_hold_its_connection() -> None:
    """The answer is there, and the rest of the body drips."""

    async def test(server: Server) -> None:
        async def refuse(_: Any, __: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 405, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        peer = server.peer()
        peer.protocol.app = refuse  # type: ignore[assignment]
        peer.send(HEAD + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(12):
            await asyncio.sleep(1)
            if peer.open:
                peer.send(b"x")
        assert b" 405 " in peer.got
        assert not peer.open

    serve(test)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("addresses", "most"),
    [
        (["192.0.2.1"], MAX_IDLE_PER_CLIENT),
        (["2001:db8::1", "2001:db8::2", "2001:db8::3"], MAX_IDLE_PER_CLIENT),  # one network of one client
        ([f"192.0.2.{number}" for number in range(250)], MAX_IDLE),
    ],
)
def test_idle_connections_are_bounded_and_the_longest_idle_ones_make_room(addresses: list[str], most: int) -> None:
    async def test(server: Server) -> None:
        busy = server.peer(addresses[0])
        busy.send(HEAD + b"Content-Length: 2\r\n\r\nab")
        peers = []
        for number in range(250):
            peers.append(server.peer(addresses[number % len(addresses)]))
            peers[-1].send(HEAD)
            await asyncio.sleep(0.001)
        await asyncio.sleep(2 * ARRIVAL_SECONDS)
        assert [peer.open for peer in peers] == [False] * (250 - most) + [True] * most
        server.ready.set()
        await asyncio.sleep(0.1)
        assert busy.got.endswith(b"ab"), "what is being answered is not idle"

    serve(test)


def test_other_clients_keep_their_connections() -> None:
    async def test(server: Server) -> None:
        other = server.peer("192.0.2.2")
        for _ in range(2 * MAX_IDLE_PER_CLIENT):
            server.peer("192.0.2.1")
        await asyncio.sleep(2 * ARRIVAL_SECONDS)
        assert other.open

    serve(test)


def test_requests_that_a_busy_machine_reads_late_are_answered() -> None:
    async def test(server: Server) -> None:
        peers = [server.peer("192.0.2.1") for _ in range(200)]

        def read() -> None:
            for peer in peers:
                peer.send(HEAD + b"Content-Length: 2\r\n\r\nab")

        asyncio.get_running_loop().call_later(ARRIVAL_SECONDS, read)
        await asyncio.sleep(2 * ARRIVAL_SECONDS)
        server.ready.set()
        await asyncio.sleep(0.1)
        assert all(peer.got.endswith(b"ab") for peer in peers)

    serve(test)


@pytest.mark.slow
def test_requests_of_many_clients_behind_one_address_at_once_are_all_read() -> None:
    async def test(server: Server) -> None:
        peers = [server.peer("192.0.2.1") for _ in range(200)]
        for peer in peers:
            peer.send(HEAD + b"Content-Length: 2\r\n\r\nab")
        await asyncio.sleep(2 * ARRIVAL_SECONDS)
        assert all(peer.open for peer in peers)
        more = [server.peer("192.0.2.1") for _ in range(2 * CONNECTIONS)]
        assert sum(peer.open for peer in (*peers, *more)) <= 2 * CONNECTIONS + 1, "at once, however many come"
        server.ready.set()
        await asyncio.sleep(0.1)
        assert all(peer.got.endswith(b"ab") for peer in peers), "what is being answered is not idle"

    serve(test)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_half_closed_client_gets_its_answer(version: bytes) -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        peer.send(HEAD.replace(b"1.1", version) + b"Content-Length: 2\r\n\r\nab")
        peer.half_close()
        await asyncio.sleep(60)
        assert peer.open
        server.ready.set()
        await asyncio.sleep(0.1)
        *interim, answer = peer.got.removesuffix(b"\r\n\r\nab").split(b"\r\n\r\n")
        assert all(line.startswith(b"HTTP/1.1 100") for line in interim), "which clients ignore"
        assert len(interim) in ({0} if version == b"1.0" else range(8, 16))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert not peer.open, "nothing more can be asked"
        assert server.left == 0

    serve(test)


def test_a_client_that_left_is_found_out_at_once() -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        peer.send(HEAD + b"Content-Length: 2\r\n\r\nab")
        await asyncio.sleep(1)
        peer.leave()
        await asyncio.sleep(0.2)
        assert server.left == 1

    serve(test)


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 2\r\n\r\na"])
def test_a_client_that_closes_before_it_has_asked_is_gone(sent: bytes) -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        peer.send(sent)
        await asyncio.sleep(0.1)
        peer.half_close()
        await asyncio.sleep(0.1)
        assert not peer.open
        assert server.left == (b"\r\n\r\n" in sent)

    serve(test)


def chunked(count: int, size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, b"x" * size) * count


def test_a_body_in_very_many_chunks_ends_early() -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        peer.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        while peer.open and sent < 1_000_000:
            peer.send(chunked(100, 1))
            sent += 100
            await asyncio.sleep(0)
        assert sent < 1200
        assert b" 400 " in peer.got
        assert "chunks" in error(peer)
        await asyncio.sleep(0.1)
        assert server.left == 1

    serve(test)


@pytest.mark.parametrize(("count", "size"), [(1000, 1), (3000, 1024)])
def test_chunks_that_are_few_or_large_enough_are_read(count: int, size: int) -> None:
    async def test(server: Server) -> None:
        server.ready.set()
        peer = server.peer()
        for _ in range(2):  # each request by itself
            peer.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(count, size) + b"0\r\n\r\n")
            await asyncio.sleep(0.1)
            assert peer.got.endswith(b"x" * count * size)
            assert peer.open

    serve(test)


def test_what_is_not_http_is_refused_in_openais_form() -> None:
    async def test(server: Server) -> None:
        peer = server.peer()
        peer.send(b"SSH-2.0\r\n\r\n")
        assert b" 400 " in peer.got
        assert "Invalid HTTP request" in error(peer)
        assert not peer.open

    serve(test)
