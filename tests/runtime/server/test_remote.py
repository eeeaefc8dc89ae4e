"""Images at addresses: which are fetched, from where, and how much."""

from __future__ import annotations

import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import WAIT, asking, serving, user
from tests.support.tiny import random_image
from vtx.runtime.errors import RequestError
from vtx.runtime.server import remote
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.remote import RemoteImage, connect_public, fetch, is_public, remote_image

HOSTS = ("pictures.example",)
IMAGE = RemoteImage(HOSTS[0], "/a.png?b=c")


@contextmanager
def answering(
    reply: bytes, *, keep_open: bool = False
) -> Iterator[tuple[Callable[[str, float], socket.socket], list[bytes]]]:
    """A `connect` whose other end reads one request and gives this reply."""
    asked: list[bytes] = []
    ended = threading.Event()
    threads = []

    def connect(_: str, seconds: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(seconds)

        def serve() -> None:
            with theirs:
                asked.append(theirs.recv(4096))
                try:
                    theirs.sendall(reply)
                    if keep_open:
                        ended.wait(WAIT)
                except OSError:
                    pass

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return ours

    try:
        yield connect, asked
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_an_image_is_fetched_by_its_path_and_query() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd") as (connect, asked):
        assert fetch(remote_image("https://pictures.example/a.png?b=c", HOSTS), 10, WAIT, connect) == b"abcd"
    assert asked[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: pictures.example\r\n")


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example/a.png", "https://other.example/a.png", "https://pictures.example:8443/a.png",
        "https://pictures.example.evil.example/a", "https://a@pictures.example/a", "https://:b@pictures.example/a",
        "https://pictures.example:x/a", "https://[pictures.example/a", "https://127.0.0.1/a", "file:///etc/passwd",
        "https://pictures.example/a b", "https://pictures.example/\r\nHost: x", "https://pictures.ex\u00e4mple/",
        "https://pictures.example/" + 2048 * "a", "https://pictures.example@127.0.0.1/", "//pictures.example/a", "a",
    ],
)  # fmt: skip
def test_no_other_address_is_fetched(url: str) -> None:
    with pytest.raises(RequestError):
        remote_image(url, HOSTS)


@pytest.mark.parametrize("status", [301, 302, 307, 404, 500])
def test_redirects_are_not_followed(status: int) -> None:
    reply = b"HTTP/1.1 %d X\r\nLocation: https://pictures.example/b\r\nContent-Length: 0\r\n\r\n" % status
    with answering(reply) as (connect, asked), pytest.raises(Refusal, match=f"{status}, and redirects"):
        fetch(IMAGE, 10, WAIT, connect)
    assert len(asked) == 1


@pytest.mark.parametrize("head", [b"Content-Length: 11\r\n", b"Connection: close\r\n"])
def test_no_more_than_the_limit_is_read(head: bytes) -> None:
    with (
        answering(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + 11 * b"x") as (connect, _),
        pytest.raises(Refusal) as refusal,
    ):
        fetch(IMAGE, 10, WAIT, connect)
    assert refusal.value.status == 413


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab"])
def test_a_host_that_says_nothing_more_is_given_up(reply: bytes) -> None:
    with answering(reply, keep_open=True) as (connect, _), pytest.raises(Refusal, match="took too long"):
        fetch(IMAGE, 10, 0.2, connect)


def test_a_host_that_drips_is_given_up() -> None:
    """Each byte comes in time, and the image never."""
    ours, theirs = socket.socketpair()
    head, given_up = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", threading.Event()

    def drip() -> None:
        with theirs, suppress(OSError):
            theirs.recv(4096)
            theirs.sendall(head)
            for _ in range(2000):
                theirs.sendall(b"x")
                time.sleep(0.005)
            return
        given_up.set()

    def connect(_: str, seconds: float) -> socket.socket:
        ours.settimeout(seconds)
        return ours

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(Refusal, match="took too long"):
        fetch(IMAGE, 1 << 20, 0.3, connect)
    thread.join()
    assert given_up.is_set(), "and was read to its end"


def test_what_is_not_http_is_refused() -> None:
    with answering(b"SSH-2.0\r\n") as (connect, _), pytest.raises(Refusal, match="failed"):
        fetch(IMAGE, 10, WAIT, connect)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "ff02::1",
        "64:ff9b::a00:1", "2002:a00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_private_addresses_are_not_connected_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 443)) for one in ("93.184.215.14", address)]

    monkeypatch.setattr(remote.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(remote.socket, "socket", lambda *_: pytest.fail("it connects"))
    with pytest.raises(Refusal, match="not public"):
        connect_public("pictures.example", 1.0)


def test_public_addresses_are_public() -> None:
    assert all(is_public(address) for address in ("93.184.215.14", "2606:2800:21f:cb07::1", "::ffff:93.184.215.14"))


def test_the_address_that_was_looked_at_is_asked_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = listening.getsockname()
        lookups = []

        def resolve(*_: Any, **__: Any) -> Any:
            lookups.append(1)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where)]

        monkeypatch.setattr(remote.socket, "getaddrinfo", resolve)
        monkeypatch.setattr(remote, "is_public", lambda _: True)
        hello: list[bytes] = []

        def accept() -> None:
            connection, _ = listening.accept()
            with connection:
                hello.append(connection.recv(4096))

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ssl.SSLError):
            connect_public("pictures.example", WAIT)
        thread.join()
    assert hello[0][:1] == b"\x16", "a TLS handshake"
    assert b"pictures.example" in hello[0]
    assert len(lookups) == 1


def test_a_server_fetches_from_its_hosts_and_by_default_from_none(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    random_image(1).save(out, "PNG")
    fetched = []

    def from_memory(image: RemoteImage, limit: int, seconds: float) -> bytes:
        fetched.append((image, limit, seconds))
        return out.getvalue()

    monkeypatch.setattr("vtx.runtime.server.endpoints.fetch", from_memory)
    there = {"type": "image_url", "image_url": {"url": "https://pictures.example/a.png?b=c"}}
    asked = asking({"role": "user", "content": [there, {"type": "text", "text": "red?"}]})
    with serving({"tiny": tiny_bundle}, image_hosts=HOSTS) as served:
        answer, same = served.chat(asked).json, served.chat(asking(user("red?", random_image(1)))).json
        refused = served.chat(json_with(asked, "https://other.example/a.png"))
        assert (refused.status, refused.json["error"]["param"]) == (400, "messages")
    assert fetched == [(IMAGE, 32 << 20, 10.0)]
    assert answer["choices"][0]["message"] == same["choices"][0]["message"]
    with serving({"tiny": tiny_bundle}) as served:
        assert served.chat(asked).status == 400
    assert len(fetched) == 1


def json_with(body: dict[str, Any], url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {**body, "messages": [{"role": "user", "content": [part, {"type": "text", "text": "red?"}]}]}
