"""Builds one engine with Polygraphy, in a process of its own: a crash of the builder ends this process only.

One JSON object on stdin is the request; JSON lines on stdout answer, progress first, then the result or an error. When
stdin ends before that, the build is cancelled. TensorRT and Polygraphy log to stderr, and all that they say with
VTX_TENSORRT_LOG set: the layers of the engine, their kernels and the nodes that they come from among it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtx.runtime.backends.tensorrt.engine import LOG
from vtx.runtime.bundle.bundle import sha256
from vtx.tools.common import memory

_INTERVAL = 0.1  # seconds between two reports of progress
_RTX = "tensorrt_rtx"


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the builder prints there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which closes our stdin
    request = json.loads(sys.stdin.readline())
    stopped = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=wait_for_end, daemon=True).start()

    def send(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    started = time.monotonic()
    engine = Path(request["engine"])
    if error := _build(request, send, stopped):
        send(error=error)
        return
    seconds = time.monotonic() - started
    send(seconds=seconds, memory=memory.peak() or 0, bytes=engine.stat().st_size, sha256=sha256(engine))


class BuildProgress:
    """Phases nest: the running step of an outer phase is filled by the phases within it.

    The builder does not report how many phases share one step, nor the number of outermost phases. So the next phase
    within a step would start over; `share` keeps the largest value so far.
    """

    def __init__(self) -> None:
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # the phase around it, finished steps, all steps
        self.share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = parent, 0, max(steps, 1)

    def step(self, name: str, step: int) -> None:
        """Step number `step`, counted from 0, is complete."""
        parent, _, steps = self._phases.get(name, (None, 0, 1))
        self._phases[name] = parent, min(step + 1, steps), steps
        self.share = max(self.share, self._share_within(None))

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def _share_within(self, parent: str | None) -> float:
        running = [(name, done, steps) for name, (around, done, steps) in self._phases.items() if around == parent]
        return max((min(done + self._share_within(name), steps) / steps for name, done, steps in running), default=0.0)


class _FirstError(logging.Handler):
    """Keeps the first error that is logged; later ones are its consequences."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.message = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.message = self.message or record.getMessage()
        print(record.getMessage(), file=sys.stderr)


def _build(request: dict[str, Any], send: Callable[..., None], stopped: threading.Event) -> str | None:
    """Build the engine; the reason if that fails."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if request["flavour"] == _RTX else "0"  # read at its import
    poly: Any = importlib.import_module("polygraphy.backend.trt")
    trt: Any = importlib.import_module(request["flavour"])
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    first_error = _FirstError()
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.colors = False
    G_LOGGER.letter = False
    verbose = bool(os.environ.get(LOG))
    G_LOGGER.module_severity = G_LOGGER.EXTRA_VERBOSE if verbose else G_LOGGER.ERROR
    G_LOGGER.python_logger.addHandler(first_error)
    if verbose:
        G_LOGGER.python_logger.setLevel(1)
        G_LOGGER.python_logger.addHandler(logging.StreamHandler(sys.stderr))
    G_LOGGER.python_logger.propagate = False
    typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")  # later releases have no other kind
    network = poly.NetworkFromOnnxPath(request["graph"], strongly_typed=typed)  # the graph declares the precisions
    if hasattr(trt.LayerType, "ATTENTION_INPUT"):  # since 10.14
        # Attention without a fused kernel, as in float32, is computed from its parts instead of failing.
        network = poly.SetDecomposableAttentions(network)
    workspace = request["workspace"]
    profiles = []
    for shapes in request["profiles"]:
        profiles.append(poly.Profile())
        for name, sizes in shapes.items():
            profiles[-1].add(name, *map(tuple, sizes))
    options = {
        "profiles": profiles,
        "load_timing_cache": request["timing_cache"],
        "profiling_verbosity": trt.ProfilingVerbosity.DETAILED,  # so that an inspector can name layers
        "memory_pool_limits": {trt.MemoryPoolType.WORKSPACE: workspace} if workspace else None,
        "progress_monitor": _monitor(trt, send, stopped),
        "max_aux_streams": 0,  # those of TensorRT wait for the default stream, and a token's work is one chain
    }
    if request["flavour"] == _RTX:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        def allocate_ourselves(builder: Any, network: Any, config: Any) -> None:
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # without it no stream can be captured

        config = CreateConfigRTX(**options, compute_capabilities=[tuple(request["capability"])])
        config = poly.PostprocessConfig(config, allocate_ourselves)
    else:
        config = poly.CreateConfig(**options, tf32=hasattr(trt.BuilderFlag, "TF32"))  # as TensorRT's own default
    build = poly.EngineBytesFromNetwork(network, config, save_timing_cache=request["timing_cache"])
    try:
        engine = build()
    except PolygraphyException as e:
        return "cancelled" if stopped.is_set() else first_error.message or str(e)
    if stopped.is_set():
        return "cancelled"
    with open(request["engine"], "wb") as file:
        file.write(engine)
        os.fsync(file.fileno())
    return None


def _monitor(trt: Any, send: Callable[..., None], stopped: threading.Event) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Sends the progress, at most every `_INTERVAL` seconds, and stops a cancelled build."""

        def __init__(self) -> None:
            super().__init__()
            self._progress = BuildProgress()
            self._sent = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._progress.start(phase_name, parent_phase, num_steps)
            self._send(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._progress.step(phase_name, step)
            self._send(phase_name)
            return not stopped.is_set()

        def phase_finish(self, phase_name: str) -> None:
            self._progress.finish(phase_name)

        def _send(self, phase: str) -> None:
            if time.monotonic() - self._sent >= _INTERVAL:
                self._sent = time.monotonic()
                send(phase=phase, share=self._progress.share)

    return Monitor()


if __name__ == "__main__":
    main()
