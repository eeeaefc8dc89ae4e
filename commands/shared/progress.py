"""The progress bars of an export: one for each phase, with the bytes done and the time left.

The forecast is made again as the work goes: phases to come are expected to be off by as much as those before them were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vtx.runtime.units import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID

IN_BYTES = ("weights", "checksums")
ALL = "in all"
TELLING = 0.1  # the share of a phase, and of all work, from which on its pace says something
OFF, LEFT = 1.5, 5.0  # a forecast is told again where it is off by this factor, with this many seconds still to go


@contextmanager
def export_bars() -> Iterator[Bars]:
    """Bars on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    phase, left, amount = (TextColumn(f"{{task.{name}}}") for name in ("description", "fields[left]", "fields[amount]"))
    with Progress(phase, BarColumn(), TaskProgressColumn(), left, amount, console=Console(stderr=True)) as progress:
        yield Bars(progress)


class Bars:
    """The state of all phases; called with (phase, done, total) as the work proceeds."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._start = progress, progress.get_time()
        self._ids: dict[str, TaskID] = {}
        self._expected: dict[str, float] = {}
        self._told = 0.0

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Show these phases, each with its expected time."""
        self._expected, self._start = dict(seconds), self._progress.get_time()
        self._told = sum(seconds.values())
        for phase in (*seconds, ALL):
            self._add(phase, None)
        self._show_left()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._ids:
            self._add(phase, total)
        if not self._task(phase).started:
            self._progress.start_task(self._ids[phase])
        self._progress.update(self._ids[phase], completed=done, total=total)
        self._progress.update(self._ids[phase], amount=self._amount(self._task(phase)))
        self._show_left()

    def left(self, phase: str) -> float:
        """Seconds that a phase still needs: by its pace, else as forecast, corrected by the phases before it.

        The first tensors may be tiny, and take as long as large ones: their pace says nothing of a forecast phase.
        """
        task = self._task(phase)
        if task.finished:
            return 0.0
        remaining = _remaining(task)
        if remaining is not None and (task.percentage >= 100 * TELLING or phase not in self._expected):
            return remaining
        return self._expected.get(phase, 0.0) * (1 - task.percentage / 100) * self._drift()

    def _drift(self) -> float:
        """How many times as long as forecast the work takes that has been begun; 1 while that says little."""
        taken = {phase: seconds for phase in self._expected if (seconds := self._whole(self._task(phase))) is not None}
        expected = sum(self._expected[phase] for phase in taken)
        return sum(taken.values()) / expected if expected > TELLING * sum(self._expected.values()) else 1.0

    def _whole(self, task: Task) -> float | None:
        """Seconds that a phase took or, by its pace, will take; None before it has one."""
        if task.finished:
            return task.finished_time
        remaining = _remaining(task)
        if remaining is None or task.elapsed is None or task.percentage < 100 * TELLING:
            return None
        return task.elapsed + remaining

    def _show_left(self) -> None:
        seconds = {phase: self.left(phase) for phase in self._ids if phase != ALL}
        for phase, count in seconds.items():
            self._progress.update(self._ids[phase], left="" if self._task(phase).finished else duration(count))
        if ALL in self._ids:
            passed, left = self._progress.get_time() - self._start, sum(seconds.values())
            total = passed + left
            if left > LEFT and not self._told / OFF < total < self._told * OFF:
                self._progress.console.print(f"forecast again: about {duration(total)}, not {duration(self._told)}")
                self._told = total
            self._progress.update(self._ids[ALL], completed=passed, total=total, left=duration(left))

    def _amount(self, task: Task) -> str:
        if task.description not in IN_BYTES:
            return f"{task.completed:.0f} of {task.total:.0f}"
        rate = f", {size(task.speed)}/s" if task.speed else ""
        return f"{size(task.completed)} of {size(task.total or 0)}{rate}"

    def _add(self, phase: str, total: float | None) -> None:
        self._ids[phase] = self._progress.add_task(phase, start=total is not None, total=total, left="", amount="")

    def _task(self, phase: str) -> Task:
        task_id = self._ids[phase]
        return next(task for task in self._progress.tasks if task.id == task_id)


def _remaining(task: Task) -> float | None:
    """Seconds by the pace of the task; rich's own figure is rounded up to whole ones, far off for a short phase."""
    return task.remaining / task.speed if task.speed and task.remaining is not None else None
