"""Graphs of a bundle that are loaded in parallel: an engine folds and packs weights on one thread a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.host.machine import available_memory

T = TypeVar("T")
SMALL_BYTES = 64 << 20  # of all weights: these fit in parallel anywhere
SPARE = 2  # times what a bundle needs must be free, since each graph holds weights twice while they are packed


def is_roomy(bundle: Bundle, floats: Mapping[str, int]) -> bool:
    """True if a load may use memory to be quicker: graphs in parallel, and freed memory kept for the next.

    `floats` as in `needed_memory`.
    """
    weights = sum(file.bytes for name, file in bundle.manifest.files.items() if name.startswith("weights/"))
    if weights <= SMALL_BYTES:
        return True
    free = available_memory()
    return free is not None and free >= SPARE * needed_memory(bundle, floats)


def load_each(loads: Sequence[Callable[[], T]], threads: int, sizes: Sequence[int]) -> list[T]:
    """The results of the calls, in their order; `threads` run at a time, the largest of `sizes` first.

    So the last of them is a short one, for which few threads wait. The first error is raised once all calls that began
    have ended; the others do not begin.
    """
    if threads == 1 or len(loads) < 2:
        return [load() for load in loads]
    with ThreadPoolExecutor(threads, "vtx-load") as pool:
        begun = {i: pool.submit(loads[i]) for i in sorted(range(len(loads)), key=lambda i: -sizes[i])}
        try:
            return [begun[i].result() for i in range(len(loads))]
        finally:
            pool.shutdown(cancel_futures=True)
