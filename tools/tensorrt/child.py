"""One engine built in a child process, which is ended in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.backends.tensorrt.engine import LOG
from vtx.runtime.errors import ExportError
from vtx.runtime.host.interpreter import python
from vtx.tools.tensorrt.profiles import Shapes

GRACE = 10  # seconds that a builder gets to stop by itself
WORKER = ("-m", "vtx.tools.tensorrt.worker")
Watch = Callable[[str, float], None]  # gets the builder's phase, and the finished share of the build


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The child's job: `graph` to `engine`, for one compute capability."""

    flavour: str
    graph: Path
    engine: Path
    capability: tuple[int, int]
    profiles: tuple[Shapes, ...]
    workspace: int | None = None
    timing_cache: Path | None = None

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields, default=str) + "\n"


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The engine's size and SHA-256, and the child's seconds and peak resident memory in bytes."""

    bytes: int
    sha256: str
    seconds: float
    memory: int


def build(request: BuildRequest, watch: Watch, worker: tuple[str, ...] = WORKER) -> BuiltEngine:
    """Build one engine; `watch` is called with the progress. An interrupt ends the child first. Raises ExportError."""
    with tempfile.TemporaryFile("w+") as log:
        output = None if os.environ.get(LOG) else log
        child = subprocess.Popen(
            [python(), *worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        result: dict[str, Any] | None = None
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(request.to_json())
                child.stdin.flush()
            for line in child.stdout:
                event: dict[str, Any] = json.loads(line)
                if "phase" not in event:
                    result = event
                    break
                watch(event["phase"], event["share"])
        finally:  # a closed stdin asks the child to stop
            for pipe in (child.stdin, child.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()
            try:
                child.wait(GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        log.seek(0)
        last = " ".join(log.read()[-2000:].split())[-400:]
    if result is None:
        code = child.returncode
        fix = "the bundle is unchanged; try another --workspace or another release of TensorRT"
        if code == -signal.SIGKILL:
            fix = "the memory was probably too small: free some, or export with a smaller precision or --stage-layers"
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise ExportError(f"the builder of {request.graph.name} died ({how}){last and ': ' + last}; {fix}")
    if "error" in result:
        reason = " ".join(result["error"].split())[-400:]
        raise ExportError(f"TensorRT cannot build {request.graph.name}: {reason}; the bundle is unchanged")
    return BuiltEngine(**result)
