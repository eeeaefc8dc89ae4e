"""A stand-in for Ray with the calls that vtx makes: workers in this process, whose arguments are pickled to them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@dataclass
class Standin:
    """What was asked of it: the arguments of `map_batches`, and the rows that each worker got."""

    asked: dict[str, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)


def standin(monkeypatch: pytest.MonkeyPatch, *machines: tuple[float, float]) -> Standin:
    """Put a cluster of machines with these numbers of cores and GPUs in the place of Ray."""
    seen = Standin()
    ray, data = ModuleType("ray"), ModuleType("ray.data")

    class Rows:
        def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
            self._rows = rows

        def map_batches(self, worker: type, **asked: Any) -> Rows:
            seen.asked, self._worker = asked, worker
            return self

        def iter_rows(self) -> Iterator[dict[str, Any]]:
            given = pickle.dumps(seen.asked["fn_constructor_kwargs"])
            workers = [self._worker(**pickle.loads(given)) for _ in range(seen.asked["compute"])]
            seen.rows = [[] for _ in workers]
            for number, row in enumerate(self._rows):
                turn = number % len(workers)
                seen.rows[turn].append(row["chunk"])
                columns = workers[turn]({name: np.array([value]) for name, value in row.items()})
                yield {name: column[0] for name, column in columns.items()}

    class Context:
        enable_progress_bars = True

    named: dict[str, Any] = {
        "init": lambda **_: None, "shutdown": lambda: None, "put": pickle.dumps, "get": pickle.loads, "data": data,
        "nodes": lambda: [{"Alive": True, "Resources": {"CPU": c, **({"GPU": g} if g else {})}} for c, g in machines],
    }  # fmt: skip
    vars(ray).update(named)
    context = type("DataContext", (), {"get_current": staticmethod(lambda: Context)})
    vars(data).update(
        DataContext=context, from_items=lambda rows, override_num_blocks: Rows(rows),
        ActorPoolStrategy=lambda size, max_tasks_in_flight_per_actor: size,
    )  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    monkeypatch.setitem(__import__("sys").modules, "ray.data", data)
    return seen
