"""What this machine can do at the most: matrix products through onnxruntime, and reading memory.

The product is of the prompt's rows with one matrix of the model's size, or larger where these are small, in float32,
on the threads that the bundle computes with. Its graph is written here byte by byte, without an exporting library.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bench.series import Series, spread
from vtx.runtime.errors import DeviceError
from vtx.runtime.machine import available_memory
from vtx.runtime.ort import load_onnxruntime, share_threads
from vtx.runtime.units import size

LEAST = (256, 1024, 1024)  # rows, depth, width: a smaller product is no ceiling
MAX_WEIGHTS = 1 << 26  # elements of the matrix
READ_BYTES = 1 << 29  # beyond any cache
COPIES = 4  # of the matrix while its graph is made and loaded
LEAST_MS = 20.0  # one figure is the mean of calls that took so long together


class Ceilings:
    """Measured in turn with the bundle, so that both meet the same machine.

    Raises DeviceError where memory is short, or onnxruntime is missing or computes with another number of threads.
    """

    def __init__(self, rows: int, depth: int, width: int, threads: int) -> None:
        rows, depth, width = (max(least, given) for least, given in zip(LEAST, (rows, depth, width), strict=True))
        width = max(1, min(width, MAX_WEIGHTS // depth))
        _check_memory(COPIES * 4 * depth * width + READ_BYTES)
        self._product = Product(rows, depth, width, threads)
        self._memory = Memory(threads)
        self.gemm, self.read = list[float](), list[float]()
        self._what = {
            "gemm": f"onnxruntime MatMul [{rows}, {depth}] x [{depth}, {width}], float32, {threads} threads",
            "read": f"reading {self._memory.bytes >> 20} MiB of memory, {threads} threads",
        }

    def measure(self) -> None:
        """One more figure of each."""
        self.gemm.append(_rate(self._product.flops, self._product))
        self.read.append(_rate(self._memory.bytes, self._memory))

    def report(self) -> dict[str, Any]:
        """What was measured and its spread: FLOP/s of `gemm`, bytes/s of `read`."""
        found: dict[str, tuple[str, Series]] = {
            "gemm": ("flops_per_s", spread(self.gemm)),
            "read": ("bytes_per_s", spread(self.read)),
        }
        return {name: {"what": self._what[name], unit: series} for name, (unit, series) in found.items()}


class Product:
    """One matrix product of `flops` FLOPs a call; the matrix is a constant, as weights are."""

    def __init__(self, rows: int, depth: int, width: int, threads: int) -> None:
        ort, random = load_onnxruntime(), np.random.default_rng(0)
        share_threads(ort, threads)
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        weights = random.standard_normal((depth, width), np.float32)
        self._session = ort.InferenceSession(matmul(rows, weights), options, providers=["CPUExecutionProvider"])
        self._rows = {"x": random.standard_normal((rows, depth), np.float32)}
        self.flops = 2 * rows * depth * width

    def __call__(self) -> None:
        self._session.run(None, self._rows)


class Memory:
    """Every call reads all of `bytes` bytes, a slice a thread; finding the largest number is faster than memory."""

    def __init__(self, threads: int) -> None:
        self.bytes = READ_BYTES
        self._parts: list[NDArray[np.int32]] = np.array_split(np.ones(self.bytes // 4, np.int32), threads)
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        for _ in self._pool.map(np.max, self._parts):
            pass


def _check_memory(needed: int) -> None:
    free = available_memory()
    if free is not None and free < needed:
        raise DeviceError(f"measuring them takes {size(needed)} of memory, and {size(free)} is free; close something")


def _rate(amount: int, call: Any) -> float:
    """`amount` a call as a rate per second, over calls that take `LEAST_MS` together."""
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        seconds = time.perf_counter() - start
        if 1000 * seconds >= LEAST_MS:
            return amount * count / seconds


# --- a graph of one MatMul, in the wire format of ONNX's protocol buffers -------------------------

FLOAT, OPSET, IR_VERSION = 1, 21, 10


def matmul(rows: int, weights: NDArray[np.float32]) -> bytes:
    """An ONNX model that multiplies `x` [rows, depth] by `weights` [depth, width] into `y`."""
    depth, width = weights.shape
    stored = [*((1, size) for size in weights.shape), (2, FLOAT), (8, b"w"), (9, weights.tobytes())]
    node = [(1, b"x"), (1, b"w"), (2, b"y"), (4, b"MatMul")]
    graph = [
        (1, _message(node)), (2, b"product"), (5, _message(stored)),
        (11, _value(b"x", rows, depth)), (12, _value(b"y", rows, width)),
    ]  # fmt: skip
    return _message([(1, IR_VERSION), (7, _message(graph)), (8, _message([(1, b""), (2, OPSET)]))])


def _value(name: bytes, *shape: int) -> bytes:
    """A ValueInfoProto of float32."""
    dims = _message([(1, _message([(1, size)])) for size in shape])
    return _message([(1, name), (2, _message([(1, _message([(1, FLOAT), (2, dims)]))]))])


def _message(fields: Sequence[tuple[int, int | bytes]]) -> bytes:
    """A protocol-buffer message of (number, value) fields: whole numbers as varints, the rest by length."""
    parts = list[bytes]()
    for number, value in fields:
        if isinstance(value, int):
            parts += [bytes(_varint(number << 3)), bytes(_varint(value))]
        else:
            parts += [bytes(_varint(number << 3 | 2)), bytes(_varint(len(value))), value]
    return b"".join(parts)


def _varint(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
