"""The expert of a model that answers with actions: a second decoder, which reads the K and V of the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vtx.runtime.bundle.spec.model_spec import MAX_SIZE, require
from vtx.runtime.strict import optional

MAX_STEPS = 1000
Statistics = tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """An expert, whose layers, key/value heads and rotary embedding are those of the decoder.

    It makes `horizon` actions of `width` numbers from a state of `state` numbers and noise, in `steps` steps of time
    from 1 to 0, which enters by waves with periods from `min_period` to `max_period`. `cameras` name the pictures of a
    prompt in their order; empty: any number. The others are means and standard deviations of what a robot's states and
    actions are, by which they are normalised; None if the checkpoint has none.
    """

    hidden: int
    intermediate: int
    heads: int
    eps: float
    activation: str
    state: int
    width: int
    horizon: int
    steps: int
    min_period: float
    max_period: float
    cameras: tuple[str, ...] = optional(())
    state_mean: Statistics = optional(None)
    state_std: Statistics = optional(None)
    actions_mean: Statistics = optional(None)
    actions_std: Statistics = optional(None)

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.intermediate, self.heads, self.state, self.width, self.horizon, self.steps)
        require(
            all(1 <= size <= MAX_SIZE for size in sizes) and self.hidden % 2 == 0 and self.steps <= MAX_STEPS,
            f"action: sizes {list(sizes)!s:.80} are not those of an expert",
        )
        periods = (self.eps, self.min_period, self.max_period)
        require(all(0 < x < math.inf for x in periods), f"action: {list(periods)!s:.60} are not positive numbers")
        named = [*self.cameras]
        require(len(set(named)) == len(named) and all(named), f"action: cameras {named!s:.80} hold a name twice")
        for what, most in (("state", self.state), ("actions", self.width)):
            mean, std = getattr(self, f"{what}_mean"), getattr(self, f"{what}_std")
            require(
                (mean is None and std is None)
                or (
                    mean is not None and std is not None and len(mean) == len(std) and 1 <= len(mean) <= most
                    and all(map(math.isfinite, mean)) and all(0 <= x < math.inf for x in std)
                ),
                f"action: the statistics of {what} are not up to {most} means and as many deviations",
            )  # fmt: skip
