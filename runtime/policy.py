"""Policies answer the one question asked between two stages: which vision rows go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from vtx.runtime.errors import RequestError
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


def make_policy(k: int | str | None, manifest: Manifest) -> Policy:
    """The policy that `k` means: a prebuilt K, "none" or None.

    Raises:
        RequestError: a K out of range, or one the bundle was not cut at.

    """
    if k is None or k == "none":
        return Full()
    if k == "auto":
        raise RequestError("--k auto needs trained gates and this bundle has none; use --k none or one of its K")
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
