"""Confined children that are forked from a process which has imported what they need.

A child of `confine` takes a second of processor time, nearly all of it to import transformers. `ForkServer` starts a
process that imports it once, and forks a child for each request, which sets its limits and runs `main` as others do.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from threading import Lock
from typing import IO

from vtx.exporter.checkpoint import confined
from vtx.exporter.checkpoint.confined import ChildLimits

# Where the functions stand that the process has imported.
MODULES = {"vtx.exporter.checkpoint.resolving", "tests.support.confined"}
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.support.fork_server import serve; "
    "serve(int(sys.argv[2]))"
)


class ForkServer:
    """The process is started with the first child."""

    def __init__(self) -> None:
        self._start_child = confined.run_child
        self._lock = Lock()  # one child at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._channel, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(
        self,
        target: str,
        limits: ChildLimits,
        libraries: tuple[str, ...],
        question: IO[str],
        answer: IO[bytes],
        log: IO[bytes],
    ) -> int | None:
        """As `confined.run_child`, which starts the children of other modules."""
        if libraries or target.partition(":")[0] not in MODULES:
            return self._start_child(target, limits, libraries, question, answer, log)
        with self._lock:
            if self._process is None:
                self._process = self._start()
            request = json.dumps([asdict(limits), target, libraries]).encode()
            socket.send_fds(self._channel, [request], [file.fileno() for file in (question, answer, log)])
            child = int(self._channel.recv(64))
            self._channel.settimeout(limits.wall_seconds)
            try:
                return int(self._channel.recv(64))
            except TimeoutError:
                os.kill(child, 9)
                self._channel.settimeout(None)
                self._channel.recv(64)
                return None
            finally:
                self._channel.settimeout(None)

    def _start(self) -> subprocess.Popen[bytes]:
        path = [entry for entry in sys.path if os.path.isabs(entry)]
        number = self._other.fileno()
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(path), str(number)],
            pass_fds=[number], stdin=subprocess.DEVNULL, env=os.environ | confined.ENVIRONMENT,
        )  # fmt: skip

    def close(self) -> None:
        self._channel.close()
        self._other.close()
        if self._process is not None:
            self._process.wait()


def serve(number: int) -> None:
    """Import what reads tokenizers, without the libraries that a child does not find; then fork until the end."""
    from vtx.exporter.checkpoint.confined_child import hide

    hide()
    for module in MODULES:
        importlib.import_module(module)
    from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: F401

    channel = socket.socket(fileno=number)
    while True:
        request, files, *_ = socket.recv_fds(channel, 1 << 16, 3)
        if not request:
            return
        child = os.fork()
        if not child:
            _become(channel, request, files)
        for file in files:
            os.close(file)
        channel.send(str(child).encode())
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _become(channel: socket.socket, request: bytes, files: list[int]) -> None:
    """The child's whole life."""
    from vtx.exporter.checkpoint.confined_child import main

    code = 1
    try:
        channel.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        main(*json.loads(request))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)
