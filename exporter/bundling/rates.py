"""The speed of this machine at the work of an export, measured by doing a little of it with the same code."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import BinaryIO

import torch

from vtx.exporter.weights.journal import PROBE
from vtx.exporter.weights.plan import WeightEntry, WeightFile, laid_out, stored_tensor
from vtx.exporter.weights.stored import StoredTensor
from vtx.exporter.weights.tensors import BundleWeights
from vtx.exporter.weights.whole import take_whole
from vtx.exporter.weights.writing import CHUNK, THREADS, forget, write_tensor
from vtx.runtime.bundle.safetensors import read_bits, read_header, write_safetensors

ELEMENTS = 8 * CHUNK  # of a tensor, in one trial
TRIALS = 3  # the median counts: on a busy machine one of them may be delayed
DISK_SAMPLE = 16 << 20, 128 << 20  # bytes of the disk trial, least and most, by the size of the export
DISK_SHARE = 32
SPOTS = 128  # of a file, checked for being in memory
PRODUCT_S = 0.05
LAYER_SECONDS = 0.002  # of a layer of the reference over one prompt beside its products: what small models cost

Form = tuple[str, str, int, bool]  # safetensors dtypes before and after, bits of a quantised matrix, file taken whole


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of the processor: `write` a source byte that is converted and hashed, `read` an element as float32."""

    write: float
    read: float


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes a second from and to the disk, and seconds that a small file takes to be safe there."""

    read: float
    write: float
    sync: float


def form_of(file: WeightFile, entry: WeightEntry) -> Form:
    """The properties of a tensor that decide its pace."""
    return entry.source.dtype, entry.dtype, entry.scheme.bits if entry.scheme else 0, file.whole


def measure_paces(files: Iterable[WeightFile], folder: Path) -> dict[Form, Pace]:
    """The pace of each form among `files`, from a part of its largest tensor, written under `folder` and read again."""
    largest = dict[Form, tuple[WeightFile, WeightEntry]]()
    for file in files:
        for entry in file.entries:
            form = form_of(file, entry)
            if form not in largest or entry.source.nbytes > largest[form][1].source.nbytes:
                largest[form] = file, entry
    with ThreadPoolExecutor(THREADS) as pool:
        return {form: _pace(file, entry, folder / PROBE, pool) for form, (file, entry) in largest.items()}


def _pace(file: WeightFile, entry: WeightEntry, probe: Path, pool: ThreadPoolExecutor) -> Pace:
    write, part = _write_whole if file.whole else _write_anew, _part(entry)
    trials = list[Pace]()
    for _ in range(1 + TRIALS):
        seconds, stored = write(file, part, probe, pool)
        reading = seconds_of(lambda tensor=stored: BundleWeights(probe.parent, {"": tensor}).read(""))  # type: ignore[misc]
        trials.append(Pace(seconds, reading / max(1, prod(part.source.shape))))
    tried = trials[1:]  # the first finds nothing in memory
    return Pace(median(trial.write for trial in tried), median(trial.read for trial in tried))


def _part(entry: WeightEntry) -> WeightEntry:
    """The first rows of a tensor, at least one."""
    shape = entry.source.shape
    width = max(1, prod(shape[1:]))
    part = (min(shape[0], max(1, ELEMENTS // width)), *shape[1:]) if shape else ()
    nbytes = entry.source.nbytes * prod(part) // max(1, prod(shape))
    return replace(entry, source=replace(entry.source, shape=part, nbytes=nbytes))


def _write_anew(_: WeightFile, part: WeightEntry, probe: Path, pool: ThreadPoolExecutor) -> tuple[float, StoredTensor]:
    """Seconds per source byte, and the location of the part."""
    header, [entry] = laid_out(PROBE, [(part.name, part.source)], [(part.dtype, part.scheme)])
    read_bits(part.source)  # read it from the disk before the clock starts
    with probe.open("wb") as out:
        out.write(header)
        seconds = seconds_of(lambda: write_tensor(entry, out, hashlib.sha256(), pool, lambda _: None))
    return seconds / max(1, part.source.nbytes), stored_tensor(PROBE, entry)


def _write_whole(
    file: WeightFile, part: WeightEntry, probe: Path, pool: ThreadPoolExecutor
) -> tuple[float, StoredTensor]:
    """The same of a file that is taken whole, by as many of its first bytes as the part has."""
    start = _start_of(file, part.source.nbytes)
    with file.source.open("rb") as source:
        source.read(start.size)
    seconds = seconds_of(lambda: take_whole(start, probe, pool, lambda _: None))
    probe.unlink()
    write_safetensors(probe, {"": read_bits(part.source)}, None)
    [info] = read_header(probe).tensors.values()
    return seconds / start.size, StoredTensor(PROBE, info.offset, info.nbytes, part.dtype, part.source.shape)


def _start_of(file: WeightFile, size: int) -> WeightFile:
    """The file cut off `size` bytes after its first needed tensor begins, at least eight."""
    first = min(entry.source.offset for entry in file.entries)
    size = min(file.size, first + max(8, size))
    entries = [
        replace(entry, source=replace(entry.source, nbytes=min(entry.source.nbytes, (size - entry.source.offset) & ~7)))
        for entry in file.entries
        if entry.source.offset < size
    ]
    return replace(file, entries=tuple(entries), size=size)


def measure_disk(folder: Path, sources: Iterable[Path], work: int) -> Disk:
    """Of the disk of `folder`, and for reading that of the first of `sources` that is not in memory.

    Disks are quick at first, so the sample grows with the bytes of the `work`.
    """
    size = min(DISK_SAMPLE[1], max(DISK_SAMPLE[0], work // DISK_SHARE))
    cold = next((spot for spot in (_cold_spot(path, size) for path in sources) if spot), None)
    probe, data = folder / PROBE, os.urandom(1 << 20)
    with probe.open("wb") as out:
        sync = seconds_of(lambda: _write(out, data[:4096], 1))
        write = seconds_of(lambda: _write(out, data, size // len(data)))
        forget(out)
    read = seconds_of(lambda: _read(*(cold or (probe, 0)), size))
    probe.unlink()
    return Disk(size / read, size / write, sync)


def _write(out: BinaryIO, data: bytes, times: int) -> None:
    for _ in range(times):
        out.write(data)
    out.flush()
    os.fsync(out.fileno())


def _read(path: Path, start: int, size: int) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(size >> 20):
            file.read(1 << 20)


def _cold_spot(path: Path, size: int) -> tuple[Path, int] | None:
    """The start in a file of `size` bytes that are not in memory, by a sample; None if there are none."""
    starts = range(0, max(0, path.stat().st_size - size), size)
    return next(((path, start) for start in starts if not any(_in_memory(path, [start, start + size // 2]))), None)


def cached_share(path: Path) -> float:
    """The share of a file that the system has in memory, by a sample; 0 where it does not report it."""
    size = path.stat().st_size
    return sum(_in_memory(path, [size * spot // SPOTS for spot in range(SPOTS)])) / SPOTS


def _in_memory(path: Path, starts: Iterable[int]) -> Iterator[bool]:
    """Whether a byte could be read without waiting for a disk."""
    byte = bytearray(1)
    with path.open("rb", buffering=0) as file:
        for start in starts:
            cached = False
            with suppress(AttributeError, OSError):
                cached = os.preadv(file.fileno(), [byte], start, os.RWF_NOWAIT) > 0
            yield cached


def product_speed(hidden: int, ffn: int, tokens: int) -> float:
    """FLOPs a second of a product [tokens, hidden] x [hidden, ffn], whose weights exceed the processor's caches."""
    a, b = torch.ones(tokens, hidden), torch.ones(ffn, hidden)
    torch.nn.functional.linear(a, b)
    start, taken = time.perf_counter(), list[float]()
    while time.perf_counter() - start < PRODUCT_S:
        taken.append(seconds_of(lambda: torch.nn.functional.linear(a, b)))
    return 2 * a.numel() * len(b) / median(taken)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds on the wall that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
