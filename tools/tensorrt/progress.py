"""The finished share of a build, from the phases that TensorRT's builder reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildPhase:
    """A running phase: its parent phase or None, the number of finished steps, and of all."""

    parent: str | None
    done: int
    steps: int


class BuildProgress:
    """Phases nest: the running step of an outer phase is filled by the phases within it.

    The builder does not report how many phases share one step, nor the number of outermost phases. So the next phase
    within a step would start over; `share` keeps the largest value so far.
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
