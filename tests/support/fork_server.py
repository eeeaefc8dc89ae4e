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
from contextlib import suppress
from threading import Lock
from typing import BinaryIO

from vtx.runtime.host import confined
from vtx.runtime.host.confined import Child, ChildTask

# Where the functions stand that the process has imported.
MODULES = {"vtx.exporter.checkpoint.resolving", "tests.support.confined"}
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.support.fork_server import serve; "
    "serve(int(sys.argv[2]))"
)


forked_seconds = 0.0  # of processor time, of children that have ended, while the process that forks them lives


class ForkServer:
    """The process is started with the first child."""

    def __init__(self) -> None:
        self._start_child = confined.start_child
        self._lock = Lock()  # one child at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._channel, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self, task: ChildTask, data: BinaryIO | None, answer: int, log: BinaryIO) -> Child:
        """As `confined.start_child`, which starts the children of other modules."""
        if data is not None or task.libraries or task.target.partition(":")[0] not in MODULES:
            return self._start_child(task, data, answer, log)
        self._lock.acquire()
        if self._process is None:
            self._process = self._start()
        with confined.scratch() as question:
            confined.write_task(question, task)
            socket.send_fds(self._channel, [b"fork"], [question.fileno(), answer, log.fileno()])
        return _Forked(self._channel, self._lock, int(self._channel.recv(64)))

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
            global forked_seconds
            forked_seconds = 0.0  # now they count as children of ours


class _Forked:
    def __init__(self, channel: socket.socket, lock: Lock, process: int) -> None:
        self._channel, self._lock, self._process, self._code = channel, lock, process, -1
        self._waited = False

    def wait(self) -> int:
        if not self._waited:
            code, seconds = self._channel.recv(64).split()
            self._code = int(code)
            global forked_seconds
            forked_seconds += float(seconds)
            self._waited = True
            self._lock.release()
        return self._code

    def kill(self) -> None:
        if not self._waited:
            with suppress(ProcessLookupError):
                os.kill(self._process, 9)


def serve(number: int) -> None:
    """Import what reads tokenizers, without the libraries that a child does not find; then fork until the end."""
    from vtx.runtime.host.confined_child import hide

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
            _become(channel, files)
        for file in files:
            os.close(file)
        channel.send(str(child).encode())
        _, status, usage = os.wait4(child, 0)
        channel.send(f"{os.waitstatus_to_exitcode(status)} {usage.ru_utime + usage.ru_stime}".encode())


def _become(channel: socket.socket, files: list[int]) -> None:
    """The child's whole life."""
    from vtx.runtime.host.confined_child import main

    code = 1
    try:
        channel.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        main(None)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)
