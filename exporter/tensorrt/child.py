"""One engine built in a child process: asked, watched, and ended, whatever becomes of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vtx.exporter.tensorrt.profiles import Shapes
from vtx.runtime.errors import ExportError

GRACE = 10  # seconds that a builder gets to give up by itself
WORKER = ("-m", "vtx.exporter.tensorrt.worker")
Watch = Callable[[str, float], None]  # the builder's phase, and the share that is done


@dataclass(frozen=True, slots=True)
class Order:
    """What the child builds: `graph` to `engine`, for one compute capability."""

    flavour: str
    graph: Path
    engine: Path
    capability: tuple[int, int]
    profiles: tuple[Shapes, ...]
    workspace: int | None
    timing_cache: Path | None

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields, default=str) + "\n"


@dataclass(frozen=True, slots=True)
class Built:
    """The engine's size and SHA-256, and what the child took: seconds, and bytes of resident memory at the peak."""

    bytes: int
    sha256: str
    seconds: float
    memory: int


def build(order: Order, watch: Watch, worker: tuple[str, ...] = WORKER) -> Built:
    """Build one engine; `watch` is told of progress. An interrupt ends the child first.

    Raises:
        ExportError: the builder refused, or its process ended without a result.

    """
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            [sys.executable, *worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True
        )
        try:
            result = _listen(child, order, watch)
        finally:
            _end(child)
        if result is None:
            raise ExportError(_obituary(child.returncode, order, words))
    if "error" in result:
        raise ExportError(
            f"TensorRT cannot build {order.graph.name}: {_short(result['error'])}; the bundle is as it was"
        )
    return Built(**result)


def _listen(child: subprocess.Popen[str], order: Order, watch: Watch) -> dict[str, Any] | None:
    """The child's last word, or None where it died before it."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(order.to_json())
        child.stdin.flush()
    except BrokenPipeError:
        return None
    for line in child.stdout:
        event: dict[str, Any] = json.loads(line)
        if "phase" not in event:
            return event
        watch(event["phase"], event["share"])
    return None


def _end(child: subprocess.Popen[str]) -> None:
    """Close the child's stdin, which asks it to stop, and see that it has."""
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _obituary(code: int, order: Order, words: IO[str]) -> str:
    words.seek(0)
    last = words.read()[-2000:]
    how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    cure = (
        "the memory was probably too small: free some, or export with a smaller precision or with more K"
        if code == -signal.SIGKILL
        else "the bundle is as it was; try another --workspace or another release of TensorRT"
    )
    return f"the builder of {order.graph.name} died ({how}){': ' + _short(last) if last.strip() else ''}; {cure}"


def _short(text: str) -> str:
    return " ".join(text.split())[-400:]
