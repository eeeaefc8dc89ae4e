"""The report of an NVIDIA GPU that a user can send: the machine, and the outcome of every step of using the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.cuda import Buffer, Cuda
from vtx.runtime.backends.driver import load_driver
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError, VtxError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.report.doctor import BundleReport, look_at_machine
from vtx.runtime.report.golden import check_golden

LONG = 400  # tokens of answers: beyond a growth of the caches, and within one
SHORT = 24
SIDE = 336  # pixels of the picture that is asked about
NUMBERS = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)


def gpu_report(folder: str | None, device: str = "tensorrt") -> dict[str, Any]:
    """The machine, and by step what it gave or `error`; with a bundle also its engines, checks and conversations."""
    steps: dict[str, Callable[[], Any]] = {"driver": use_driver}
    if folder is not None:
        steps |= {"engines": partial(engine_bytes, folder), "answers": partial(use_bundle, folder, device)}
    report = {"machine": look_at_machine().to_dict()}
    for name, step in steps.items():
        started = time.monotonic()
        try:
            outcome = step()
        except VtxError as e:
            outcome = {"error": str(e)}
        report[name] = {**outcome, "seconds": time.monotonic() - started}
    return report


def failures(report: Mapping[str, Any]) -> dict[str, str]:
    """The error of each step that failed."""
    return {name: part["error"] for name, part in report.items() if "error" in part}


def use_driver(number: int = 0) -> dict[str, Any]:
    """Memory, copies and a recording on the GPU, each compared with what it must give."""
    cuda = Cuda(load_driver(), number)
    with cuda:
        free, total = cuda.memory()
        source, to = (Buffer(cuda, NUMBERS.nbytes, "a check of the driver") for _ in range(2))
        cuda.copy_in(source.address, NUMBERS)
        cuda.zero(to)
        cuda.copy_rows(to.address, 1024, source.address, 1024, 512, 256)
        half = np.empty_like(NUMBERS)
        cuda.copy_out(half, to.address)
        cuda.wait()
        count = cuda.pinned((1,), np.int64)
        out = cuda.pinned((1,), np.int64)
        graph = cuda.record(partial(_echo, cuda, source.address, count, out))
        count[0] = 7
        if graph is not None:
            graph.launch()
        cuda.wait()
    if not np.array_equal(half[:, :128], NUMBERS[:, :128]) or half[:, 128:].any():
        raise DeviceError("the GPU copies other numbers than it was told to; see dmesg")
    recorded = graph is not None and int(out[0]) == 7
    return {"free": free, "total": total, "available": available_memory(), "recorded": recorded}


def _echo(cuda: Cuda, address: int, told: Any, out: Any) -> None:
    cuda.copy_in(address, told)
    cuda.copy_out(out, address)


def engine_bytes(folder: str) -> dict[str, Any]:
    """Of each target the bytes of its engines and of the files that each was built from."""
    bundle = Bundle.open(folder, check=False)
    sets = [fingerprint.read_engines(bundle, target) for target in fingerprint.targets(bundle)]
    return {
        engines.target: {
            "version": engines.version,
            "bytes": {graph: record.bytes for graph, record in engines.engines.items()},
        }
        for engines in sets
    }


def use_bundle(folder: str, device: str) -> dict[str, Any]:
    """The bundle's golden vectors on the device, and the answers and times of short, long and again short questions."""
    model = load(folder, device=device)
    checks = BundleReport.of(model, check_golden(model)).to_dict()
    return {"golden": checks, "conversations": [_ask(model, count) for count in (SHORT, SHORT, LONG, SHORT)]}


def _ask(model: Model, count: int) -> dict[str, Any]:
    """Two questions about a picture, of which the second reuses it."""
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    most = min(count, model.manifest.max_context // 4)
    with model.open([pixels]) as image:
        answers = [image.ask(word, max_new_tokens=most, ignore_eos=True) for word in ("What is this?", "And why?")]
    return {"tokens": most, "answers": [answer.to_dict() for answer in answers]}
