"""Builds one engine, in a process of its own: a crash of the builder ends this process and nothing else.

One JSON object on stdin asks; JSON lines on stdout answer, progress first, then the result or an error. When stdin
ends before that, the build is given up. TensorRT's own words go to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.bundle import sha256

_PAUSE = 0.1  # seconds between two reports of progress


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the builder prints there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which closes our stdin
    request = json.loads(sys.stdin.readline())
    stopped = threading.Event()
    threading.Thread(target=_wait_for_end, args=(stopped,), daemon=True).start()

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    started = time.monotonic()
    try:
        _build(request, tell, stopped)
    except _BuildError as e:
        tell(error=str(e))
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tell(seconds=time.monotonic() - started, memory=peak, **_weigh(request["engine"]))


class _BuildError(Exception):
    pass


def _wait_for_end(stopped: threading.Event) -> None:
    sys.stdin.read()
    stopped.set()


def _weigh(path: str) -> dict[str, Any]:
    return {"bytes": os.stat(path).st_size, "sha256": sha256(Path(path))}


def _build(request: dict[str, Any], tell: Any, stopped: threading.Event) -> None:
    trt = importlib.import_module(request["flavour"])
    logger = _logger(trt)
    builder = trt.Builder(logger)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["graph"]):
        problems = [parser.get_error(number).desc() for number in range(parser.num_errors)]
        raise _BuildError("; ".join(problems) or "it does not parse")
    _allow_decomposing(trt, network)
    config = _config(trt, builder, request)
    config.progress_monitor = _monitor(trt, tell, stopped)
    engine = builder.build_serialized_network(network, config)
    if stopped.is_set():
        raise _BuildError("given up")
    if engine is None:
        raise _BuildError(logger.last or "the builder gives no reason")
    with open(request["engine"], "wb") as file:
        file.write(engine)
        os.fsync(file.fileno())
    if request["timing_cache"]:
        with open(request["timing_cache"], "wb") as file:
            file.write(config.get_timing_cache().serialize())


def _allow_decomposing(trt: Any, network: Any) -> None:
    """Let attention without a fused kernel, as in float32, be computed from its parts instead of failing."""
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)  # from 10.14 on
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        if kind is not None and layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings' way of a cast
            layer.attention.decomposable = True


def _config(trt: Any, builder: Any, request: dict[str, Any]) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # so that an inspector can name layers
    if request["workspace"]:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request["workspace"])
    if request["flavour"] == "tensorrt_rtx":
        major, minor = request["capability"]
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{major}{minor}"), 0)
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # without it no stream can be captured
    if request["timing_cache"]:
        try:
            with open(request["timing_cache"], "rb") as file:
                known = file.read()
        except FileNotFoundError:
            known = b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=True)
    for shapes in request["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (low, likely, high) in shapes.items():
            profile.set_shape(name, low, likely, high)
        config.add_optimization_profile(profile)
    return config


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Errors to stderr; the first is the reason, the later ones its consequences."""

        def __init__(self) -> None:
            super().__init__()
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity <= self.ERROR:
                self.last = self.last or message
                print(message, file=sys.stderr)

    return Logger()


def _monitor(trt: Any, tell: Any, stopped: threading.Event) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Phases nest; the share done is that of the outermost, its running part filled by the phases within."""

        def __init__(self) -> None:
            super().__init__()
            self._phases: dict[str, tuple[str | None, int, int]] = {}  # parent, steps done, steps
            self._told = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase, 0, max(num_steps, 1))
            self._tell(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            parent, _, steps = self._phases.get(phase_name, (None, 0, 1))
            self._phases[phase_name] = (parent, min(step + 1, steps), steps)
            self._tell(phase_name)
            return not stopped.is_set()

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

        def _tell(self, phase: str) -> None:
            if time.monotonic() - self._told >= _PAUSE:
                self._told = time.monotonic()
                tell(phase=phase, share=self._share(None))

        def _share(self, parent: str | None) -> float:
            running = [(name, done, steps) for name, (above, done, steps) in self._phases.items() if above == parent]
            return max((min(done + self._share(name), steps) / steps for name, done, steps in running), default=0.0)

    return Monitor()


if __name__ == "__main__":
    main()
