"""What a backend must do, and nothing more: run the graphs and hold the caches."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class StageCache(Protocol):
    """K/V of one stage for one conversation, [layers, 2, kv_heads, capacity, head_dim], and the stage's run.

    `length` counts filled slots. Positions live with the rows, not here: after a withdrawal the next
    row's position is larger than `length`.
    """

    length: int

    def append(self, rows: Rows, positions: NDArray[np.int64]) -> Rows:
        """Run [n, hidden] rows at their positions; their K/V fill the next n slots. Returns [n, hidden]."""
        ...

    def keep(self, length: int) -> None:
        """Forget every slot from `length` on."""
        ...


class Backend(Protocol):
    """The graphs of one bundle, loaded on one device. Safe to share between threads."""

    device: str

    def embed(self, ids: NDArray[np.int64]) -> Rows:
        """Token ids [n] to rows [n, hidden]."""
        ...

    def vision(self, pixels: NDArray[np.float32]) -> Rows:
        """Images [images, 3, height, width] to rows [images * vision_tokens, hidden]."""
        ...

    def head(self, rows: Rows) -> NDArray[np.float32]:
        """Rows [n, hidden] to logits [n, vocab]."""
        ...

    def gate(self, k: int, rows: Rows) -> NDArray[np.float32]:
        """The odds [2] (stay, withdraw) that the gate before layer `k` gives for a question's rows [n, hidden]."""
        ...

    def stage(self, index: int, capacity: int) -> StageCache:
        """An empty cache of `capacity` slots for stage `index` (from 0)."""
        ...
