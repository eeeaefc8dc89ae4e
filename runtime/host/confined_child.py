"""The child of `confined`: it sets its limits, runs one function, and writes the results as records.

A record is the length of its header and of its payload, the header as JSON, and the payload. Of the last one the
header is the result.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from types import GeneratorType, ModuleType
from typing import IO, Any

from vtx.runtime.errors import VtxError
from vtx.runtime.host import sandbox

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows: the parent's deadline is all there is
    resource = None

LENGTHS = struct.Struct("<QQ")
HIDDEN = {"torch", "torchvision", "tensorflow", "jax", "flax", "PIL", "sklearn", "scipy", "pandas", "matplotlib", "av"}

_held: list[str] = []  # what the kernel holds this process to


class _Hiding:
    """An import finder without the heavy libraries that no parser needs; transformers takes any it sees."""

    def __init__(self, finder: Any, hidden: Collection[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main(task: dict[str, Any] | None) -> None:
    """Run the `target` of a task, `module:function`, on its `request`, and write the result to stdout.

    None: the task is on stdin. It finds only those heavy libraries that `libraries` names.
    """
    if task is None:
        task = json.load(sys.stdin)
    limits = task["limits"]
    if resource is not None:
        seconds = limits["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        last = seconds + 1 if most == resource.RLIM_INFINITY else min(most, seconds + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, last))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    hide(task["libraries"])
    for library in task["libraries"]:  # trusted, and some write files while they are imported
        with suppress(ImportError):
            importlib.import_module(library)
    _held[:] = [*(["limits"] if resource else []), *sandbox.enter(task["reads"])]
    answer = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not an answer
    with open(answer, "wb", buffering=0) as file:
        text = json.dumps(_result(task["target"], task["request"], file)).encode()
        _send(file, text if len(text) <= limits["file"] else b'{"limit": "file"}', b"")


def confinement(_: Any) -> list[str]:
    return _held


def hide(libraries: Collection[str] = ()) -> None:
    """Hide the heavy libraries from this process, except those named."""
    hidden = HIDDEN.difference(libraries)
    sys.meta_path[:] = [_Hiding(finder, hidden) for finder in sys.meta_path]


def _result(target: str, request: Any, file: IO[bytes]) -> dict[str, Any]:
    module, _, name = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(request)
        while isinstance(value, GeneratorType):  # each item is a record: (header, parts of the payload)
            try:
                header, payload = next(value)
            except StopIteration as end:
                value = end.value
            else:
                _send(file, json.dumps({"item": header}).encode(), *payload)
        return {"value": value}
    except VtxError as error:
        if isinstance(error.__cause__, MemoryError):
            return {"limit": "memory"}
        error_class = next(kind for kind in type(error).__mro__ if kind.__module__ == VtxError.__module__)
        return {"error": error_class.__name__, "message": str(error)}
    except MemoryError:
        return {"limit": "memory"}
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.ENOMEM):
            return _crash(error)
        return {"limit": "file" if error.errno == errno.EFBIG else "memory"}
    except Exception as error:  # the data may fail in every corner of the libraries
        return _crash(error)


def _crash(error: Exception) -> dict[str, Any]:
    return {"crash": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _send(file: IO[bytes], header: bytes, *payload: Any) -> None:
    parts = [memoryview(part).cast("B") for part in payload]
    file.write(LENGTHS.pack(len(header), sum(part.nbytes for part in parts)) + header)
    for part in parts:
        while part.nbytes:
            part = part[file.write(part) :]
