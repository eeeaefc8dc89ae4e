"""A small server of the hub's protocol on the loopback address, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "c" * 40


@dataclass
class Hub:
    """Models by id, each a directory; what was asked; and how the server misbehaves."""

    models: dict[str, Path]
    address: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    cuts: int = 0  # of the next answers with weights, each breaks off after half of what it has to send
    wrong: bytes | None = None  # sent in the place of as many of the weights' first bytes
    lost: int = 0  # bytes that the weights are shorter than their announced size
    stuck: str | None = None  # the file that never comes whole
    reached: threading.Event = field(default_factory=threading.Event)  # once it is stuck
    sent: int = 0  # bytes of files
    refused: tuple[int, str, str] | None = None  # a status for every request, an error's code and its message

    def served(self, name: str) -> list[str | None]:
        """The ranges of the requests for a file."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith(f"/{name}")]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path, asked = self.path.partition("?")[0], self.headers.get("Range")
            hub.requests.append((self.command, path, asked))
            if hub.refused:
                self._send(hub.refused[0], b"", {"X-Error-Code": hub.refused[1], "X-Error-Message": hub.refused[2]})
                return
            parts = path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            model = "/".join(parts[2:4] if api else parts[:2])
            revision = parts[5] if api and len(parts) > 5 else parts[3] if len(parts) > 3 else ""
            folder = hub.models.get(model)
            if folder is None:
                self._send(
                    401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
                )
            elif revision not in ("main", COMMIT, "tag"):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif api:
                files = [_described(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()]
                if parts[4] == "revision":
                    siblings = [{"rfilename": file["path"]} for file in files]
                    value: object = {"_id": "1", "id": model, "sha": COMMIT, "siblings": siblings}
                else:
                    value = files
                self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})
            else:
                self._file(folder, "/".join(parts[4:]), asked, body=body)

        def _file(self, folder: Path, name: str, asked: str | None, *, body: bool) -> None:
            file = folder / name
            content = file.read_bytes()
            weights = file.suffix == ".safetensors"
            described = _described(file, folder)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{described["oid"]}"', "Accept-Ranges": "bytes"}
            if weights:
                large = described["lfs"]
                assert isinstance(large, dict)
                headers |= {"X-Linked-Etag": f'"{large["oid"]}"', "X-Linked-Size": str(len(content))}
                if hub.wrong:
                    content = hub.wrong + content[len(hub.wrong) :]
                content = content[: len(content) - hub.lost]
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            rest = content[start:]
            if body and file.name == hub.stuck:
                self._send(200, rest[: len(rest) // 2], headers, length=len(rest))
                hub.reached.set()
                self.connection.recv(1)  # until the client is gone
                self.close_connection = True
            elif weights and body and hub.cuts:
                hub.cuts -= 1
                self._send(206 if asked else 200, rest[: len(rest) // 2], headers, length=len(rest))
                self.close_connection = True
            else:
                self._send(206 if asked else 200, rest if body else b"", headers, length=len(rest))

        def _send(self, status: int, content: bytes, headers: dict[str, str], *, length: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) if length is None else length))
            self.end_headers()
            self.wfile.write(content)
            hub.sent += len(content)

    return Handler


def _described(file: Path, folder: Path) -> dict[str, object]:
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, object] = {
        "type": "file",
        "path": file.relative_to(folder).as_posix(),
        "size": len(content),
        "oid": blob,
    }
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def serving_hub(models: dict[str, Path]) -> Iterator[Hub]:
    """Serve these models until the block ends."""
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask_here(hub: Hub, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let huggingface_hub ask this hub in this process, with `cache` for what it fetches."""
    constants = pytest.importorskip("huggingface_hub.constants")
    patch.setattr(constants, "ENDPOINT", hub.address)
    template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
