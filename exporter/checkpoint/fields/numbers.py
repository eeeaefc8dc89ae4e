"""Numbers of a configuration, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.runtime.errors import CheckpointError

MAX_WIDTH = 1 << 20
NUMBERS = (1e-15, 1e15)  # float32 computes with these without overflow


def size(config: Any, name: str, limit: int = MAX_WIDTH) -> int:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise CheckpointError(
            f"config.json: {name} is {value!r:.60}, not a number from 1 to {limit}; correct config.json"
        )
    return value


def number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name, default)
    low, high = NUMBERS
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(
            f"config.json: {name} is {value!r:.60}, not a number from {low:g} to {high:g}; correct config.json"
        )
    return float(value)
