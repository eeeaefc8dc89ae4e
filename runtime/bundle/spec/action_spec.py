"""Models that answer with actions: an expert, which reads the K and V of the prompt, or tokens that are bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vtx.runtime.bundle.spec.model_spec import MAX_SIZE, require
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import UPGRADE, optional

MAX_STEPS = 1000
WIDEST = 1e30  # of a range of actions, which are float32
MAX_BINS = 1 << 16
MAX_NUMBERS = 256  # of an action, a token each
STATE_BINS = 256  # of a number of a state that is text
STATE_IN = ("expert", "prompt", "text")
Statistics = tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """An expert, whose layers, key/value heads and rotary embedding are those of the decoder.

    It makes `horizon` actions of `width` numbers from a state of `state` numbers and noise, in `steps` steps of time
    from 1 to 0, which enters by waves with periods from `min_period` to `max_period`. `cameras` name the pictures of a
    prompt in their order; empty: any number. `absent_cameras`: some of them may be missing. `instruction_tokens`: the
    most tokens of the prompt's text.

    `state_in`: the state is a token of the "expert", the last one of the "prompt", or bins in the prompt's "text".
    `adaptive`: time enters by the expert's norms, else beside the actions. `causal`: an action sees no later ones.
    `self_every`: in every n-th layer from the first, actions see each other and the decoder's K and V; in the others
    only projections of these. `mean` and `std`, or `low` and `high`, which become -1 and 1, are the statistics by which
    states and actions are normalised; None if the checkpoint has none.
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
    state_low: Statistics = optional(None)
    state_high: Statistics = optional(None)
    actions_low: Statistics = optional(None)
    actions_high: Statistics = optional(None)
    state_in: str = optional("expert")
    adaptive: bool = optional(False)
    causal: bool = optional(False)
    self_every: int = optional(1)
    absent_cameras: bool = optional(False)
    instruction_tokens: int | None = optional(None)

    @property
    def rows(self) -> int:
        """The number of the expert's tokens."""
        return self.horizon + (self.state_in == "expert")

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
        if self.state_in not in STATE_IN:
            raise BundleError(
                f"vtx.json: action: state_in is {self.state_in[:40]!r}, unknown to this vtx, which has "
                f"{', '.join(STATE_IN)}; {UPGRADE}"
            )
        counts = (self.self_every, 1 if self.instruction_tokens is None else self.instruction_tokens)
        require(all(1 <= x <= MAX_SIZE for x in counts), f"action: {list(counts)!s:.60} are not numbers from 1")
        for what, most in (("state", self.state), ("actions", self.width)):
            stated = [name for name in ("mean", "low") if getattr(self, f"{what}_{name}") is not None]
            require(len(stated) < 2, f"action: {what} have both deviations and ranges")
            for first, second in (("mean", "std"), ("low", "high")):
                self._check_statistics(what, most, first, second)

    def _check_statistics(self, what: str, most: int, first: str, second: str) -> None:
        """Raise BundleError unless both are there in as many numbers, or neither."""
        low = getattr(self, f"{what}_{first}")
        high = getattr(self, f"{what}_{second}")
        require(
            (low is None and high is None)
            or (
                low is not None
                and high is not None
                and len(low) == len(high)
                and 1 <= len(low) <= most
                and all(map(math.isfinite, low))
                and all(abs(x) < math.inf and (second == "high" or x >= 0) for x in high)
            ),
            f"action: the statistics of {what} are not up to {most} {first} and as many {second} numbers",
        )


@dataclass(frozen=True, slots=True)
class ActionRange:
    """The range of each number of an action in one data set: -1 means `low`, 1 means `high`.

    A number whose `mask` is false has no range and stays from -1 to 1.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.low), len(self.high), len(self.mask)}
        require(
            len(lengths) == 1
            and 1 <= len(self.low) <= MAX_NUMBERS
            and all(abs(x) <= WIDEST for x in (*self.low, *self.high)),
            f"bins: a range of {len(self.low)} low and {len(self.high)} high numbers and {len(self.mask)} of its mask; "
            f"they must be as many of each, 1 to {MAX_NUMBERS}, and from -{WIDEST:g} to {WIDEST:g}",
        )


@dataclass(frozen=True, slots=True)
class ActionBins:
    """Actions as tokens, one for each number: `edges` equally spaced edges from -1 to 1 bound the bins.

    Token `vocab` - 1 is the first bin, the one before it the second, and so on; other tokens are the nearest bin. A
    number is the middle of its bin. `ranges` are those of a robot's actions, by the name of the data set.
    """

    vocab: int
    edges: int
    ranges: dict[str, ActionRange]

    def __post_init__(self) -> None:
        require(
            2 <= self.edges <= MAX_BINS and self.edges <= self.vocab <= MAX_SIZE and bool(self.ranges),
            f"bins: {self.edges} edges, {self.vocab} tokens and {len(self.ranges)} data sets; they must be 2 to "
            f"{MAX_BINS} edges, no more than tokens, and at least one data set",
        )
