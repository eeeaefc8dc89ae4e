"""What the tests of policies share: boundaries with the attention that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies import Boundary
from vtx.runtime.vision.tokens import Patches

ROOT = Path(__file__).parents[2]
Floats = NDArray[np.float32]


def attention(values: list[float]) -> dict[str, Floats]:
    return {"cls_attention": np.array(values, np.float32)}


def boundary(total: list[float], most: list[float] | None = None, layer: int = 3, keys: Any = None) -> Boundary:
    """A boundary where the rows still there get this attention; `keys` is what the class token gives them."""
    count = len(total)
    image = Patches(np.arange(count), np.zeros(count, bool), {} if keys is None else attention(keys))
    scores = np.array(total, np.float32), np.array(total if most is None else most, np.float32)
    return Boundary(layer, np.zeros((1, 4), np.float32), (image,), np.ones(count, bool), lambda _: scores)
