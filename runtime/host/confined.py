"""Untrusted data is parsed in a child process that the kernel holds to limits.

    value = confine(ChildTask("package.module:function", request), Subject("the tokenizer of llava"))

`function` gets `request` and returns its result, both values of JSON. A generator also yields items, each a header of
JSON and the parts of a payload of bytes; `receive` gets each at once. A `VtxError` of the function is raised here
again. Any other failure of the child (it runs out of memory or time, aborts, crashes, or writes nonsense) becomes one
line of `error` that names the subject and the limit. The child never loads torch and other heavy libraries, which
parsers do not need, except those named in `libraries`; it starts in 0.05 s, plus the imports of `function`'s module.

On Linux and macOS the limits are RLIMIT_AS, RLIMIT_CPU and RLIMIT_FSIZE, set by the child before it reads anything, and
never above those of this process (ulimit); if Python has no `resource` module (Windows) only the deadline holds.
On Linux the child also enters a `sandbox`, in which it may read Python's own folders and `reads`. Its environment holds
the variables in `KEPT` only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import IO, Any, BinaryIO, Protocol

from vtx.runtime import errors
from vtx.runtime.errors import CheckpointError, DeviceError, RequestError, VtxError
from vtx.runtime.host import confined_child
from vtx.runtime.host.interpreter import child_command
from vtx.runtime.units import size

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

KEPT = {
    "PATH",
    "LD_LIBRARY_PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "TEMP",
    "TMP",
    "SYSTEMROOT",
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_POLL_SECONDS = 0.1  # between two calls of `stopped`


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a child: bytes of memory, seconds of processor and wall-clock time, bytes of a file or record."""

    memory: int = 4 << 30
    cpu_seconds: int = 60
    wall_seconds: float = 600
    file: int = 256 << 20

    def allowed(self) -> ChildLimits:
        """These limits, lowered to those of this process, which no child of it can exceed."""
        if resource is None:
            return self
        memory, cpu, file = (
            limit if (most := resource.getrlimit(kind)[1]) == resource.RLIM_INFINITY else min(most, limit)
            for kind, limit in (
                (resource.RLIMIT_AS, self.memory),
                (resource.RLIMIT_CPU, self.cpu_seconds),
                (resource.RLIMIT_FSIZE, self.file),
            )
        )
        return ChildLimits(memory, cpu, self.wall_seconds, file)


@dataclass(frozen=True, slots=True)
class ChildTask:
    """The function `target`, its argument, and what the child may use."""

    target: str
    request: Any
    limits: ChildLimits = ChildLimits()
    libraries: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def allowed(self) -> ChildTask:
        """The task as a child of this process can have it: within its limits, its paths absolute."""
        return replace(self, limits=self.limits.allowed(), reads=tuple(map(os.path.abspath, self.reads)))


@dataclass(frozen=True, slots=True)
class Subject:
    """The data that a child parses: its `name` in messages, and the error and cure if that fails."""

    name: str
    error: type[VtxError] = CheckpointError
    cure: str = "it is damaged or hostile; get it again from somebody you trust"


class Child(Protocol):
    def wait(self) -> int: ...
    def kill(self) -> None: ...


def confine(
    task: ChildTask,
    subject: Subject,
    *,
    data: BinaryIO | None = None,
    receive: Callable[[dict[str, Any], bytearray], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Any:
    """The result of the task's function. Raises its VtxErrors, and the subject's error, with its cure.

    `data` is an open file that the function finds on stdin. Once `stopped` returns True, the child is ended, which
    raises RequestError.
    """
    name = subject.name
    error = subject.error
    cure = subject.cure
    limits = task.limits.allowed()
    if limits != task.limits:
        cure = f"raise the limits of this shell (see ulimit -a), or {cure}"
    if stopped is not None and stopped():
        raise RequestError(f"{name} is no longer wanted; ask again")
    with scratch() as log:
        code, result, ended = _run(task.allowed(), data, log, receive, stopped)
        log.seek(0)
        text = log.read(1 << 20).decode("utf-8", "replace")
    if ended == "stopped":
        raise RequestError(f"{name} is no longer wanted; ask again")
    if ended == "late":
        raise error(f"{name} takes more than {limits.wall_seconds:g} s to read, the limit; {cure}")
    if result is None or code != 0:
        raise error(f"{name} {_end(code, text, limits)}; {cure}")
    if result.get("limit") in ("memory", "cpu", "file"):
        raise error(f"{name} {_limit(result['limit'], limits)}; {cure}")
    error_class = getattr(errors, str(result.get("error")), None)
    if isinstance(error_class, type) and issubclass(error_class, VtxError):
        raise error_class(str(result.get("message"))[:2000])
    if "value" not in result:
        raise error(f"{name} cannot be read ({str(result.get('crash'))[:200]}); {cure}")
    return result["value"]


def confinement() -> tuple[str, ...]:
    """The restrictions of a child of this process, out of "limits", "seccomp" and "landlock"."""
    task = ChildTask(f"{confined_child.__name__}:confinement", None)
    limits_of_child = confine(task, Subject("a child process", DeviceError))
    return tuple(str(name) for name in limits_of_child)


def scratch() -> BinaryIO:
    """A file without a name, in memory if the system has such files."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("vtx"), "w+b")
    return tempfile.TemporaryFile()


def write_task(file: BinaryIO, task: ChildTask) -> None:
    file.write(json.dumps(asdict(task)).encode())
    file.seek(0)


def start_child(task: ChildTask, data: BinaryIO | None, answer: int, log: BinaryIO) -> Child:
    """Start a child that reads `data`, or its task, and writes to `answer`. Raises DeviceError without a Python."""
    command = child_command()
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    arguments = json.dumps(path), json.dumps(None if data is None else asdict(task))
    environment = {name: value for name, value in os.environ.items() if name in KEPT}
    with scratch() as question:
        write_task(question, task)
        return subprocess.Popen(
            [*command, *arguments],
            stdin=question if data is None else data,
            stdout=answer,
            stderr=log,
            env=environment | ENVIRONMENT,
            start_new_session=True,
        )


def _run(
    task: ChildTask,
    data: BinaryIO | None,
    log: BinaryIO,
    receive: Callable[[dict[str, Any], bytearray], None] | None,
    stopped: Callable[[], bool] | None,
) -> tuple[int, dict[str, Any] | None, str]:
    """The child's exit status, its result if it gave one, and why it was ended: "", "late" or "stopped"."""
    reading, writing = os.pipe()
    with open(reading, "rb") as answers:
        try:
            child = start_child(task, data, writing, log)
        finally:
            os.close(writing)
        over = threading.Event()
        ended = [""]
        deadline = time.monotonic() + task.limits.wall_seconds

        def watch() -> None:
            while not over.wait(max(0.0, min(_POLL_SECONDS if stopped else 60.0, deadline - time.monotonic()))):
                if stopped is not None and stopped():
                    ended[0] = "stopped"
                elif time.monotonic() >= deadline:
                    ended[0] = "late"
                if ended[0]:
                    return child.kill()

        watcher = threading.Thread(target=watch, name="vtx-confined", daemon=True)
        watcher.start()
        try:
            result = _result(answers, task.limits.file, receive)
            code = child.wait() if result is None or "value" in result else 0  # else it does not matter
        finally:
            child.kill()
            child.wait()
            over.set()
            watcher.join()
    return code, result, ended[0]


def _result(
    answers: IO[bytes], most: int, receive: Callable[[dict[str, Any], bytearray], None] | None
) -> dict[str, Any] | None:
    """The child's last record; None: it has ended before. Records of more than `most` bytes are the last."""
    while True:
        lengths = answers.read(confined_child.LENGTHS.size)
        if len(lengths) < confined_child.LENGTHS.size:
            return None
        header_bytes, payload_bytes = confined_child.LENGTHS.unpack(lengths)
        if header_bytes > most + 1000 or payload_bytes > most:
            return {"limit": "file"}
        header = answers.read(header_bytes)
        payload = bytearray(payload_bytes)
        if len(header) < header_bytes or answers.readinto(payload) < payload_bytes:  # type: ignore[attr-defined]
            return None
        try:
            record = json.loads(header)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            return {"crash": "its process answers nonsense"}
        if receive is None or not isinstance(record.get("item"), dict):
            return record
        receive(record["item"], payload)


def _end(code: int, log: str, limits: ChildLimits) -> str:
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit status {code}"
    if name in ("SIGXCPU", "SIGKILL"):
        return _limit("cpu", limits)
    if name == "SIGXFSZ":
        return _limit("file", limits)
    if "memory allocation" in log or "bad_alloc" in log or "MemoryError" in log:
        return _limit("memory", limits)
    return f"crashes the process that reads it ({name})"


def _limit(kind: str, limits: ChildLimits) -> str:
    return {
        "memory": f"needs more than {size(limits.memory)} of memory to read, the limit",
        "cpu": f"takes more than {limits.cpu_seconds} s of processor time to read, the limit",
        "file": f"makes a file of more than {size(limits.file)}, the limit",
    }[kind]
