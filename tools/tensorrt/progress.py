"""The share of a build that is done, from the phases that TensorRT's builder reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildPhase:
    """A phase that runs: the phase it is part of (None: of none), its steps, and how many of them are done."""

    parent: str | None
    done: int
    steps: int


class BuildProgress:
    """Phases nest: the running step of an outer phase is filled by the phases within it.

    The builder does not say how many phases share one step, nor how many outermost ones there will be. So the next
    phase within a step would start over; `share` keeps the largest value that was reached.
    """

    def __init__(self) -> None:
        self._phases: dict[str, BuildPhase] = {}
        self.share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = BuildPhase(parent, 0, max(steps, 1))

    def step(self, name: str, step: int) -> None:
        """Step number `step`, counted from 0, is complete."""
        phase = self._phases.get(name, BuildPhase(None, 0, 1))
        self._phases[name] = BuildPhase(phase.parent, min(step + 1, phase.steps), phase.steps)
        self.share = max(self.share, self._share_within(None))

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def _share_within(self, parent: str | None) -> float:
        running = [(name, phase) for name, phase in self._phases.items() if phase.parent == parent]
        shares = (min(p.done + self._share_within(name), p.steps) / p.steps for name, p in running)
        return max(shares, default=0.0)
