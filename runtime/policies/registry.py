"""The register of reductions: each method enters itself when its file is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Reduction

R = TypeVar("R", bound=Reduction)
registered: dict[str, type[Reduction]] = {}


def reduction(name: str) -> Callable[[type[R]], type[R]]:
    """Register a method, a frozen dataclass, under its name; its fields are the options of its spec.

    A field is an int, a float, a float or None ("off"), a tuple of ints ("3/7/11") or a Literal of strings, and has
    a default. `option` says which values it may have.
    """

    def register(kind: type[R]) -> type[R]:
        assert dataclasses.is_dataclass(kind), f"{kind.__name__} is not a dataclass; put @dataclass below @reduction"
        if name in registered:
            raise RequestError(f"two reductions are called {name}; rename one in its @reduction(...)")
        kind.name = name
        registered[name] = kind
        return kind

    return register
