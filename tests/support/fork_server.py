"""Confined children that are forked from processes which have imported what they need.

A child of `confine` takes up to a second of processor time, nearly all of it for imports. A process for each set of
libraries makes these once, and forks a child for each request, which sets its limits and runs `main` as others do.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import BinaryIO

from vtx.runtime.host import confined
from vtx.runtime.host.confined import Child, ChildTask

# What a process has imported, by the libraries that its children find; these run functions of the modules of vtx.
MODULES: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("vtx.exporter.checkpoint.resolving", "tests.support.confined", "transformers"),
    ("av",): ("vtx.runtime.vision.video_child", "tests.support.video_faults", "av"),
    ("torch",): ("vtx.exporter.checkpoint.original.saved_child", "torch"),
}
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.support.fork_server import serve; "
    "serve(int(sys.argv[2]), tuple(json.loads(sys.argv[3])))"
)


forked_seconds = 0.0  # of processor time, of children that have ended


class ForkServers:
    """Each is started with its first child."""

    def __init__(self) -> None:
        self._start_child = confined.start_child
        self._starting = threading.Lock()  # for one of several threads
        self._servers: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def start(self, task: ChildTask, data: BinaryIO | None, answer: int, log: BinaryIO) -> Child:
        """As `confined.start_child`, which starts the children of other modules."""
        if task.target.partition(":")[0] not in MODULES.get(task.libraries, ()):
            return self._start_child(task, data, answer, log)
        with self._starting:
            if task.libraries not in self._servers:
                self._servers[task.libraries] = _started(task.libraries)
        channel = self._servers[task.libraries][1]
        ours, theirs = socket.socketpair()
        with confined.scratch() as question, theirs:
            confined.write_task(question, task)
            standard = question if data is None else data
            request = json.dumps(None if data is None else asdict(task)).encode()
            socket.send_fds(channel, [request], [standard.fileno(), answer, log.fileno(), theirs.fileno()])
        return _Forked(ours)

    def close(self) -> None:
        for process, channel in self._servers.values():
            channel.close()
            process.wait()


def _started(libraries: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(path), str(theirs.fileno()), json.dumps(libraries)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | confined.ENVIRONMENT,
        )
    return process, ours


class _Forked:
    """A child; its process, and once it has ended its exit status and seconds, come as lines."""

    def __init__(self, channel: socket.socket) -> None:
        self._lines = channel.makefile("rb")
        channel.close()
        self._process = int(self._lines.readline())
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            with self._lines:
                code, seconds = self._lines.readline().split()
            global forked_seconds
            forked_seconds += float(seconds)
            self._code = int(code)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)


def serve(number: int, libraries: tuple[str, ...]) -> None:
    """Import what children need, without the libraries that they do not find; then fork until the end."""
    from vtx.runtime.host.confined_child import hide

    hide(libraries)
    for module in MODULES[libraries]:
        importlib.import_module(module)
    if "transformers" in MODULES[libraries]:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for children
    channel = socket.socket(fileno=number)
    while True:
        request, files, *_ = socket.recv_fds(channel, 1 << 16, 4)
        if not request:
            return
        if not os.fork():
            channel.close()
            _watch(request, files)
        for file in files:
            os.close(file)


def _watch(request: bytes, files: list[int]) -> None:
    """Fork a child, and tell its process and its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, told = files
    child = os.fork()
    if not child:
        os.close(told)
        _become(request, standard)
    for file in standard:
        os.close(file)
    os.write(told, f"{child}\n".encode())
    _, status, usage = os.wait4(child, 0)
    with suppress(BrokenPipeError):
        os.write(told, f"{os.waitstatus_to_exitcode(status)} {usage.ru_utime + usage.ru_stime}\n".encode())
    os._exit(0)


def _become(request: bytes, files: list[int]) -> None:
    """The child's whole life."""
    from vtx.runtime.host.confined_child import main

    code = 1
    try:
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        main(json.loads(request))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)
