"""Peak rates of this machine: matrix products as the bundle computes them, and reading memory.

A product multiplies the prompt's hidden states by one matrix of the model's size, or of `LEAST` if that is larger, on
the threads of the bundle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.stored import BLOCK
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.strict import optional
from vtx.runtime.units import counted, size
from vtx.tools.bench.ceilings.products import Kind, Product
from vtx.tools.bench.series import Series, spread

GEMM = "gemm"  # products of the decoder, and of a tower that computes otherwise
VISION_GEMM = "vision_gemm"
LEAST = (256, 1024, 1024)  # tokens, depth, width: a smaller product does not reach the peak
MAX_WEIGHTS = 1 << 26  # elements of the matrix
READ_BYTES = 1 << 29  # beyond any cache
COPIES = 4  # of the matrix while its graph is made and loaded
LEAST_MS = 20.0  # one figure is the mean of calls that take this long together


@dataclass(frozen=True, slots=True)
class ProductRate:
    what: str
    flops_per_s: Series


@dataclass(frozen=True, slots=True)
class ReadRate:
    what: str
    bytes_per_s: Series


@dataclass(frozen=True, slots=True)
class MeasuredCeilings:
    """The products `GEMM` and `VISION_GEMM` (None if the tower computes as the decoder does), and reading."""

    gemm: ProductRate
    read: ReadRate
    vision_gemm: ProductRate | None = optional(None)


class Ceilings:
    """Measured in turn with the bundle, so that both see the same load; `kinds` are the products by name."""

    def __init__(self, kinds: Mapping[str, Kind], tokens: int, depth: int, width: int, threads: int) -> None:
        tokens, depth, width = (max(pair) for pair in zip(LEAST, (tokens, depth, width), strict=True))
        depth = BLOCK * -(-depth // BLOCK)
        width = max(1, min(width, MAX_WEIGHTS // depth))
        nbytes = COPIES * 4 * depth * width * len(kinds) + READ_BYTES
        free = available_memory()
        if free is not None and free < nbytes:
            raise DeviceError(
                f"measuring them takes {size(nbytes)} of memory, and {size(free)} is free; close other programs"
            )
        self._products = {name: Product(kind, tokens, depth, width, threads) for name, kind in kinds.items()}
        self._memory = MemoryReader(threads)
        self.products: dict[str, list[float]] = {name: [] for name in kinds}
        self.read = list[float]()
        sizes = f"a product [{tokens}, {depth}] x [{depth}, {width}]"
        threads_text = counted(threads, "thread")
        self._descriptions = {name: f"{sizes} by {kind.in_words()}, {threads_text}" for name, kind in kinds.items()}

    def measure(self) -> None:
        for name, product in self._products.items():
            self.products[name].append(_rate(product.flops, product))
        self.read.append(_rate(self._memory.bytes, self._memory))

    def report(self) -> MeasuredCeilings:
        products = {name: ProductRate(self._descriptions[name], spread(rates)) for name, rates in self.products.items()}
        reading = f"reading {self._memory.bytes >> 20} MiB of memory, {counted(self._memory.threads, 'thread')}"
        return MeasuredCeilings(**products, read=ReadRate(reading, spread(self.read)))


class MemoryReader:
    """Each call reads `bytes` bytes, a slice per thread; finding the largest number is faster than memory."""

    def __init__(self, threads: int) -> None:
        self.bytes = READ_BYTES
        self.threads = threads
        self._parts: list[NDArray[np.int32]] = np.array_split(np.ones(self.bytes // 4, np.int32), threads)
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        for _ in self._pool.map(np.max, self._parts):
            pass


def _rate(amount: int, call: Any) -> float:
    """`amount` a call as a rate per second, over calls that take `LEAST_MS` together."""
    count = 0
    start = time.perf_counter()
    while True:
        call()
        count += 1
        seconds = time.perf_counter() - start
        if 1000 * seconds >= LEAST_MS:
            return amount * count / seconds
