"""A robot's states and actions in its own units and as the model has them, by the statistics of the checkpoint."""

from __future__ import annotations

import numpy as np

from vtx.runtime.bundle.spec.action_spec import STATE_BINS, ActionSpec
from vtx.runtime.session.acting import Numbers

# Is added to each deviation, and stands for a range of 0, as in the checkpoint's processor.
SMALLEST = np.float32(1e-8)


def width_of(spec: ActionSpec, what: str) -> int | None:
    """The numbers of a state or an action in the robot's units, `what` being "state" or "actions"; None: not known."""
    statistics = getattr(spec, f"{what}_mean") or getattr(spec, f"{what}_low")
    return None if statistics is None else len(statistics)


def normalised(spec: ActionSpec, what: str, numbers: Numbers) -> Numbers:
    """States or actions [..., width] as the model has them."""
    if getattr(spec, f"{what}_mean") is not None:
        mean, std = _statistics(spec, what, "mean", "std")
        return (numbers - mean) / (std + SMALLEST)
    low, high = _statistics(spec, what, "low", "high")
    return 2 * (numbers - low) / _range(low, high) - 1


def restored(spec: ActionSpec, what: str, numbers: Numbers) -> Numbers:
    """The inverse of `normalised`; it may overflow to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        if getattr(spec, f"{what}_mean") is not None:
            mean, std = _statistics(spec, what, "mean", "std")
            return numbers * (std + SMALLEST) + mean
        low, high = _statistics(spec, what, "low", "high")
        return (numbers + 1) * _range(low, high) * np.float32(0.5) + low


def as_text(state: Numbers) -> str:
    """The bins of a normalised state, from 0 up to `STATE_BINS` - 1; -1 is a number below -1."""
    edges = np.linspace(-1, 1, STATE_BINS + 1)[:-1]
    return " ".join(map(str, np.digitize(state, edges) - 1))


def _statistics(spec: ActionSpec, what: str, first: str, second: str) -> tuple[Numbers, Numbers]:
    low, high = (np.array(getattr(spec, f"{what}_{name}"), np.float32) for name in (first, second))
    return low, high


def _range(low: Numbers, high: Numbers) -> Numbers:
    return np.where(high == low, SMALLEST, high - low)
