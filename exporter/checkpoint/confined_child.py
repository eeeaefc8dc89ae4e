"""The child of `confined`: limits first, then the one function that was asked for, and its result as JSON."""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

from vtx.runtime.errors import VtxError

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows: the parent's deadline is all there is
    resource = None

HIDDEN = {"torch", "torchvision", "tensorflow", "jax", "flax", "PIL", "sklearn", "scipy", "pandas", "matplotlib"}


class _Hiding:
    """An import finder without the heavy libraries that no parser needs; transformers takes any it sees."""

    def __init__(self, finder: Any, hidden: Collection[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main(limits: dict[str, int], target: str, libraries: Collection[str]) -> None:
    """Run `module:function` on the JSON from stdin, and write what became of it to stdout.

    Of the heavy libraries it finds those named in `libraries`.
    """
    _set_limits(limits)
    hide(libraries)
    answer = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not an answer
    text = json.dumps(_result(target))
    with open(answer, "w", encoding="utf-8") as file:
        file.write(text if len(text) <= limits["file"] else json.dumps({"limit": "file"}))


def hide(libraries: Collection[str] = ()) -> None:
    """Of the heavy libraries let this process find those named."""
    hidden = HIDDEN.difference(libraries)
    sys.meta_path[:] = [_Hiding(finder, hidden) for finder in sys.meta_path]


def _result(target: str) -> dict[str, Any]:
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return {"value": function(json.load(sys.stdin))}
    except VtxError as error:
        if isinstance(error.__cause__, MemoryError):
            return {"limit": "memory"}
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == VtxError.__module__)
        return {"error": known.__name__, "message": str(error)}
    except MemoryError:
        return {"limit": "memory"}
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return {"limit": "file"}
    except Exception as error:  # the data may fail in every corner of the libraries
        return {"crash": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _set_limits(limits: dict[str, int]) -> None:
    if resource is None:
        return
    seconds = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    last = seconds + 1 if most == resource.RLIM_INFINITY else min(most, seconds + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, last))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
