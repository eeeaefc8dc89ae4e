"""A judgement of gates: held-out items, compared with every fixed K at the same cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.strict import json_value, optional
from vtx.tools.common.plots import COLORS, draw, headline, integer_axis, percent_axis
from vtx.tools.data.intervals import Groups, grouped_share, mean_intervals
from vtx.tools.estimate.flops import total_flops, withdrawal_schedule
from vtx.tools.estimate.sizes import ModelSize

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
UNKNOWN = 2  # whether an answer is right, without one in the data
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out items: the odds of each gate [items, K], and per K (last: none) the effect of withdrawal.

    `same` [items, K and none]: the answer is the full model's; `right` likewise, `UNKNOWN` if the data have no answer;
    `tokens` [items, 2]: text and vision tokens of the prompt. `images` numbers what each item is about.
    """

    ks: tuple[int, ...]
    odds: NDArray[np.float32]
    same: Bools
    right: NDArray[np.uint8]
    tokens: NDArray[np.int64]
    images: Groups

    @property
    def layers(self) -> int:
        return self.ks[-1]

    def exits(self, threshold: float) -> NDArray[np.int64]:
        """The column of K that each item leaves at [items]: the first gate above `threshold`, else the last, none."""
        return exits(self.odds, threshold)

    def full_layers(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Layers that see the image tokens: K - 1, or all."""
        return np.array([*(k - 1 for k in self.ks), self.layers])[columns]


def exits(odds: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """As `HeldOut.exits`, from odds [items, K]."""
    columns: NDArray[np.int64] = np.concatenate([odds > threshold, np.ones((len(odds), 1), bool)], 1).argmax(1)
    return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Averages of withdrawal by some rule: layers that see the image, the share of answers equal to the full
    model's, of right answers (None: not known), and FLOPs of a prompt.
    """

    full_layers: float
    agreement: float
    accuracy: float | None
    total_flops: float


@dataclass(frozen=True, slots=True)
class FixedRival:
    """One K, or two in turn, and the share of its answers that equal the full model's."""

    what: str
    agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatesOutcome(Outcome):
    """The gates at one threshold: how many items leave at each K, and the best fixed K at no more cost.

    `difference` is by how much the gates agree more often than that one; intervals are 95%.
    """

    threshold: float
    agreement_interval: tuple[float, float]
    exits: Mapping[str, int]
    fixed_at_equal_cost: FixedRival
    difference: float
    difference_interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOutcome(Outcome):
    """One K for every question, None for no withdrawal."""

    k: int | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Held-out items under the gates at several thresholds and under every fixed K; the verdict is at 0.5."""

    items: int
    layers: int
    gates: tuple[GatesOutcome, ...]
    fixed: tuple[FixedOutcome, ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class GatesReport:
    """Gates of a model: training, items that could not be used, a judgement, and the reason if there is no `plot`."""

    model: str
    training: Mapping[str, Any]
    skipped: tuple[str, ...]
    judgement: Judgement
    plot: str | None = optional(None)

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = json_value(self)
        judgement: dict[str, Any] = values.pop("judgement")
        return values | judgement


def judge(held: HeldOut, size: ModelSize) -> Judgement:
    gates = []
    for threshold in THRESHOLDS:
        columns = held.exits(threshold)
        picked = held.same[np.arange(len(columns)), columns]
        rival, rival_same = best_fixed(held, float(held.full_layers(columns).mean()))
        agreement = grouped_share(picked.tolist(), held.images)
        [difference] = mean_intervals((picked - rival_same)[:, None], held.images)
        outcome = GatesOutcome(
            **_outcome(held, size, columns),
            threshold=threshold,
            agreement_interval=(agreement.low, agreement.high),
            exits={str(k): int((columns == n).sum()) for n, k in enumerate([*held.ks, "none"])},
            fixed_at_equal_cost=FixedRival(rival, float(rival_same.mean())),
            difference=difference.mean,
            difference_interval=(difference.low, difference.high),
        )
        gates.append(outcome)
    outcomes = [_outcome(held, size, np.full(len(held.same), column)) for column in range(len(held.ks) + 1)]
    fixed = tuple(FixedOutcome(**outcome, k=k) for outcome, k in zip(outcomes, (*held.ks, None), strict=True))
    return Judgement(len(held.same), held.layers, tuple(gates), fixed, _verdict(gates[0]))


def _outcome(held: HeldOut, size: ModelSize, columns: NDArray[np.int64]) -> dict[str, Any]:
    """The fields of an `Outcome` if each item leaves at its column of K; FLOPs in DyVTE's convention."""
    at = np.arange(len(columns)), columns
    judged = held.right[:, 0] != UNKNOWN
    ks = (*held.ks, None)
    flops = list[int]()
    for column, (text, vision) in zip(columns, held.tokens.tolist(), strict=True):
        schedule = withdrawal_schedule(held.layers, ks[column], text=text, vision=vision)
        flops.append(total_flops(size.decoder, schedule, size.seeing(vision).vision, size.views(vision)))
    return {
        "full_layers": float(held.full_layers(columns).mean()),
        "agreement": float(held.same[at].mean()),
        "accuracy": float(held.right[at][judged].mean()) if judged.any() else None,
        "total_flops": float(np.mean(flops)),
    }


def best_fixed(held: HeldOut, cost: float) -> tuple[str, NDArray[np.float64]]:
    """The best fixed K at no more than `cost` full layers, or its two neighbours in turn, and its agreement by item."""
    full = held.full_layers(np.arange(len(held.ks) + 1))
    low = int(np.flatnonzero(full <= cost)[-1])
    share = cost - full[low] if low + 1 < len(full) else 0.0
    names = [*(f"K = {k}" for k in held.ks), "no withdrawal"]
    rivals: list[tuple[str, NDArray[np.float64]]] = [(names[n], held.same[:, n].astype(float)) for n in range(low + 1)]
    if share > 0:
        mixed = (1 - share) * held.same[:, low] + share * held.same[:, low + 1]
        rivals.append((f"{names[low]} and {names[low + 1]} in turn", mixed))
    return max(reversed(rivals), key=lambda rival: float(rival[1].mean()))


def _verdict(gates: GatesOutcome) -> str:
    low, high = gates.agreement_interval
    least, most = gates.difference_interval
    rival = gates.fixed_at_equal_cost
    end = "no difference beyond chance, and a fixed K needs no gates."
    end = "the gates are better here." if least > 0 else "a fixed K is better here." if most < 0 else end
    return (
        f"At {gates.full_layers:.1f} full layers on average the gates agree with the full model on "
        f"{gates.agreement:.1%} (95% interval {low:.1%} to {high:.1%}), the best fixed K at that cost "
        f"({rival.what}) on {rival.agreement:.1%}; the difference lies between {100 * least:+.1f} and "
        f"{100 * most:+.1f} points: {end}"
    )


def draw_judgement(judgement: Judgement, path: Path) -> None:
    """Draw agreement over full layers, and the exits of the questions, into `path`. Raises as `draw` does."""

    def fill(figure: Any) -> None:
        curve, histogram = figure.subplots(1, 2)
        lines: dict[str, Sequence[Outcome]] = {"fixed K": judgement.fixed, "gates, by threshold": judgement.gates}
        for name, points in lines.items():
            curve.plot([p.full_layers for p in points], [100 * p.agreement for p in points], label=name)
        percent_axis(curve, "same answer as the full model, %", min(100 * p.agreement for p in judgement.fixed))
        curve.set(title="Agreement over cost")
        integer_axis(curve, "layers that see the image, mean")
        curve.legend()
        gate = judgement.gates[0]
        histogram.bar(range(len(gate.exits)), gate.exits.values(), color=COLORS[1])
        histogram.set_xticks(range(len(gate.exits)), list(gate.exits), rotation=90, fontsize=8)
        histogram.grid(visible=False, axis="x")
        histogram.set(title=f"K that the gates choose above {gate.threshold:g}", xlabel="K", ylabel="questions")
        headline(figure, "Gates against a fixed K", f"{judgement.items} held-out items, {judgement.layers} layers")

    draw(path, fill)
