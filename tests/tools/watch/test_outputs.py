"""Outputs of events: none holds up who sends, and what is lost is counted."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vtx.runtime.errors import DeviceError
from vtx.runtime.server.delivery import Output
from vtx.tools.watch.config import FileOutput, Mqtt, SourceConfig, StandingQuestion, WatchConfig, Webhook
from vtx.tools.watch.outputs import Poster, RotatedFile, open_outputs

WAIT = 60.0  # seconds for what should happen at once, on a busy machine


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server whose POST requests `answer` handles."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/hook?a=1"
        finally:
            running.shutdown()


def test_a_webhook_gets_each_event_with_its_headers() -> None:
    got = list[tuple[str, str, Any]]()

    def answer(request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        got.append((request.path, request.headers["X-Key"], json.loads(body)))
        request.send_response(204 if len(got) < 3 else 500)
        request.end_headers()

    with server(answer) as url:
        output = Output("hook", Poster(Webhook(url, headers={"X-Key": "k"})).post)
        for number in range(3):
            output.put(json.dumps({"n": number}).encode())
        output.close(WAIT)
    assert got == [("/hook?a=1", "k", {"n": number}) for number in range(3)]
    assert (output.sent, output.failed, output.dropped) == (2, 1, 0)


def test_a_webhook_that_hangs_holds_up_nothing_and_what_is_dropped_is_counted() -> None:
    hanging, held = threading.Event(), threading.Event()

    def answer(_: BaseHTTPRequestHandler) -> None:
        hanging.set()
        held.wait(WAIT)

    with server(answer) as url:
        output = Output("hook", Poster(Webhook(url, timeout=600.0)).post, most=3)
        output.put(b"{}")
        assert hanging.wait(WAIT)
        for _ in range(10):
            output.put(b"{}")
        assert output.dropped == 7
        output.close(0.01)
        assert output.dropped == 10
        held.set()


def test_a_webhook_that_never_answers_fails_after_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        poster = Poster(Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.1))
        with pytest.raises(TimeoutError):
            poster.post(b"{}")


def test_a_file_is_rotated_and_holds_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = RotatedFile(FileOutput(str(path), 0.001, 2))
    lines = [json.dumps({"n": number, "text": "x" * 80}).encode() for number in range(60)]
    for line in lines:
        file.write(line)
    names = ["events.jsonl.2", "events.jsonl.1", "events.jsonl"]
    assert sorted(names) == sorted(os.listdir(tmp_path))
    kept = b"".join((tmp_path / name).read_bytes() for name in names).splitlines()
    assert kept == lines[-len(kept) :]
    assert all((tmp_path / name).stat().st_size <= 1000 for name in names)
    assert len(kept) > 20


def test_a_full_disk_leaves_whole_lines_and_the_next_event_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "events.jsonl", os.write
    file = RotatedFile(FileOutput(str(path)))
    output = Output("file", file.write)
    file.write(b"1")
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:3]))
    with pytest.raises(OSError, match="no space left"):
        file.write(b"22222")
    monkeypatch.setattr(os, "write", write)
    assert path.read_bytes() == b"1\n"
    output.put(b"333")
    output.close(WAIT)
    assert (path.read_bytes(), output.sent, output.failed) == (b"1\n333\n", 1, 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_events_that_a_full_disk_takes_are_counted() -> None:
    output = Output("file", RotatedFile(FileOutput("/dev/full")).write)
    for _ in range(5):
        output.put(b"{}")
    output.close(WAIT)
    assert (output.sent, output.failed) == (0, 5)


def test_without_paho_mqtt_is_refused_by_the_name_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "paho.mqtt", None)
    config = WatchConfig(
        (SourceConfig("s", (StandingQuestion("q", "What?"),), folder="f"),), mqtt=Mqtt("127.0.0.1", "events")
    )
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[mqtt\]"'):
        open_outputs(config)


def text(value: bytes) -> bytes:
    return len(value).to_bytes(2, "big") + value


def test_a_broker_gets_events_at_the_topic() -> None:
    """Against a broker that knows just enough of MQTT 3.1.1: CONNACK, and PUBACK for each PUBLISH."""
    pytest.importorskip("paho.mqtt.client", reason="needs vtx-edge[mqtt]")
    got, both = list[bytes](), threading.Event()

    def broker(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as file, suppress(ConnectionResetError):  # at its end
            while head := file.read(1):
                length = shift = 0
                while True:
                    byte = file.read(1)[0]
                    length |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                body = file.read(length)
                if head[0] >> 4 == 1:
                    assert text(b"house/events") + text(b'{"event": "lost"}') in body, "its last will"
                    connection.sendall(b"\x20\x02\x00\x00")
                elif head[0] >> 4 == 3:
                    assert body.startswith(text(b"house/events"))
                    got.append(body[2 + len("house/events") + 2 :])
                    connection.sendall(b"\x40\x02" + body[2 + len("house/events") :][:2])
                    if len(got) == 2:
                        both.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=broker, args=(listening,), daemon=True)
        thread.start()
        config = WatchConfig(
            (SourceConfig("s", (StandingQuestion("q", "What?"),), folder="f"),),
            mqtt=Mqtt("127.0.0.1", "house/events", listening.getsockname()[1]),
        )
        (output,) = open_outputs(config)
        output.put(b'{"n": 1}')
        output.put(b'{"n": 2}')
        assert both.wait(WAIT)
        output.close()
        thread.join(WAIT)
    assert got == [b'{"n": 1}', b'{"n": 2}']
    assert (output.sent, output.failed) == (2, 0)
