"""Untrusted data is parsed in a child process that the kernel holds to limits.

    value = confine("package.module:function", request, subject="the tokenizer of llava", limits=ChildLimits())

`function` gets `request` and returns its result; both are what JSON can hold, and files go by their paths. A `VtxError`
that it raises is raised here again. Whatever else happens to the child (it runs out of memory or time, aborts, or
crashes) becomes one line of `error` that names the subject and the limit. The child never loads torch and other heavy
libraries, which parsers do not need, except those named in `libraries`; it starts in 0.1 s, beside what `function`'s
module imports.

On Linux and macOS the limits are RLIMIT_AS, RLIMIT_CPU and RLIMIT_FSIZE, set by the child before it reads anything, and
never above those of this process (ulimit); where Python has no `resource` module (Windows) only the deadline holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import IO, Any

from vtx.runtime import errors
from vtx.runtime.errors import CheckpointError, VtxError
from vtx.runtime.units import size

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

# Isolated, so that neither the working directory nor an environment variable says what is imported.
_START = (
    "import json, sys; path, limits, target, libraries = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from vtx.exporter.checkpoint.confined_child import main; main(limits, target, libraries)"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What a child may take: bytes of memory, seconds of processor and wall-clock time, bytes of a file it writes."""

    memory: int = 4 << 30
    cpu_seconds: int = 60
    wall_seconds: int = 600
    file: int = 256 << 20

    def allowed(self) -> ChildLimits:
        """These limits, lowered to what this process may have itself, which no child of it can exceed."""
        if resource is None:
            return self
        memory, cpu, file = (
            wanted if (most := resource.getrlimit(kind)[1]) == resource.RLIM_INFINITY else min(most, wanted)
            for kind, wanted in (
                (resource.RLIMIT_AS, self.memory),
                (resource.RLIMIT_CPU, self.cpu_seconds),
                (resource.RLIMIT_FSIZE, self.file),
            )
        )
        return ChildLimits(memory, cpu, self.wall_seconds, file)


def confine(
    target: str,
    request: Any,
    *,
    subject: str,
    limits: ChildLimits = ChildLimits(),
    libraries: tuple[str, ...] = (),
    error: type[VtxError] = CheckpointError,
    cure: str = "it is damaged or hostile; get it again from somebody you trust",
) -> Any:
    """What the function `target` returns for `request`. Raises what it raises on purpose, and `error`, with `cure`."""
    if limits != (limits := limits.allowed()):
        cure = f"raise the limits of this shell (see ulimit -a), or {cure}"
    with tempfile.TemporaryFile("w+") as question, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        json.dump(request, question)
        question.seek(0)
        code = run_child(target, limits, libraries, question, answer, log)
        if code is None:
            raise error(f"{subject} takes more than {limits.wall_seconds} s to read, the limit; {cure}")
        if code != 0:
            raise error(f"{subject} {_end(code, _text(log), limits)}; {cure}")
        result = json.loads(_text(answer))
    if "limit" in result:
        raise error(f"{subject} {_limit(result['limit'], limits)}; {cure}")
    if "error" in result:
        raise getattr(errors, result["error"])(result["message"])
    if "crash" in result:
        raise error(f"{subject} cannot be read ({result['crash']}); {cure}")
    return result["value"]


def run_child(
    target: str,
    limits: ChildLimits,
    libraries: tuple[str, ...],
    question: IO[str],
    answer: IO[bytes],
    log: IO[bytes],
) -> int | None:
    """Start the child and wait for it: its exit status, None where it was killed at the deadline."""
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    arguments = map(json.dumps, (path, asdict(limits), target, libraries))
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, *arguments],
        stdin=question, stdout=answer, stderr=log, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    try:
        return child.wait(limits.wall_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
        child.wait()


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


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
