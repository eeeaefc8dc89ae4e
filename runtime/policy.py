"""Policies answer the one question asked between two stages: which vision rows go on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Boundary:
    """The place between two stages, for one question.

    `layer` is the first layer of the stage to come (1-based, so it is a K); `rows` [n, hidden] are the
    question's hidden states there.
    """

    layer: int
    rows: NDArray[Any]


class Policy(Protocol):
    """Asked at each boundary in turn until it withdraws; never asked when there is no vision row."""

    def withdraws(self, boundary: Boundary) -> bool:
        """Whether the vision rows leave before layer `boundary.layer`."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """No withdrawal: every layer sees the image."""

    def withdraws(self, boundary: Boundary) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """VTW: the vision rows leave before layer `k`, positions kept (VTW section 3.3, "keep")."""

    k: int

    def withdraws(self, boundary: Boundary) -> bool:
        return boundary.layer == self.k


@dataclass(frozen=True, slots=True)
class Decision:
    """What one gate said: the probability that the vision rows may leave before layer `k`, and its cost."""

    k: int
    probability: float
    ms: float


@dataclass(frozen=True, slots=True)
class Gate:
    """DyVTE: at each boundary with a gate, the vision rows leave when its probability is above `threshold`.

    `odds` gives (stay, withdraw) for a boundary's layer and rows; 0.5 is the paper's "p1 > p0". Decisions are kept
    in `asked`, in order. No gate fires: no withdrawal.
    """

    odds: Callable[[int, NDArray[Any]], NDArray[Any]] = field(compare=False)
    ks: tuple[int, ...]
    threshold: float = 0.5
    asked: list[Decision] = field(default_factory=list, compare=False)

    def withdraws(self, boundary: Boundary) -> bool:
        if boundary.layer not in self.ks:
            return False
        start = time.perf_counter()
        probability = float(self.odds(boundary.layer, boundary.rows)[1])
        if not math.isfinite(probability):
            raise BundleError(f"the gate before layer {boundary.layer} gave {probability}; export the bundle again")
        self.asked.append(Decision(boundary.layer, probability, 1000 * (time.perf_counter() - start)))
        return probability > self.threshold


def decisions(policy: Policy) -> list[Decision] | None:
    """What the gates of a policy have said so far, or None where it asks none."""
    return policy.asked if isinstance(policy, Gate) else None


def make_policy(
    k: int | str | None,
    manifest: Manifest,
    odds: Callable[[int, NDArray[Any]], NDArray[Any]],
    threshold: float = 0.5,
) -> Policy:
    """The policy that `k` means: a prebuilt K, "auto" for the gates, "none" or None; `odds` asks a gate.

    Raises:
        RequestError: a K out of range, or one the bundle was not cut at; "auto" without gates.

    """
    if k is None or k == "none":
        return Full()
    if k == "auto":
        return _gates(manifest, odds, threshold)
    layers = manifest.model.layers
    if isinstance(k, bool) or not isinstance(k, int):
        raise RequestError(f"K is {k!r}; give a number from 2 to {layers}, or none")
    if not 2 <= k <= layers:
        raise RequestError(f"K = {k} is outside 2..{layers}: it is the first layer without vision tokens")
    if k not in manifest.variants:
        built = ", ".join(map(str, manifest.variants)) or "none at all"
        raise RequestError(
            f"K = {k} was not prebuilt, this bundle has {built}; use one of these, or export with --k {k}"
        )
    return Withdraw(k)


def _gates(manifest: Manifest, odds: Callable[[int, NDArray[Any]], NDArray[Any]], threshold: float) -> Gate:
    ks = tuple(gate.k for gate in manifest.dialects["ort"].gates)
    if not ks:
        raise RequestError(
            "--k auto needs gates and this bundle has none; use --k none or a prebuilt K, "
            "or train gates with vtx-train-gate and export with --gates"
        )
    if not 0 <= threshold <= 1:
        raise RequestError(f"the gate threshold is {threshold}; give a probability from 0 to 1")
    return Gate(odds, ks, threshold)
