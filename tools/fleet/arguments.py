"""The arguments of vtx-serve on Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.files import read_text_file
from vtx.runtime.checks import check_number
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.text import utf8
from vtx.runtime.server.engines import named
from vtx.runtime.server.keys import Keys, read_keys
from vtx.runtime.server.limits import Limits

DEFAULTS = Limits()
KINDS = {"str": str, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The arguments of the application. Each replica has all bundles, and computes with `cores` and `gpus`.

    `bundle`: [NAME=]DIR, several with commas between them, under the same paths on each machine. Between `replicas` and
    `max_replicas` run, as many as have `parallel` requests each, one more after `up_seconds` of too many and one fewer
    after `down_seconds` of too few; 0: always `replicas`. `gpus` below 0: one if the
    device is a GPU. `api_keys`: a file of keys, whose limits hold on each replica. `kv_cache` and `memory` are
    gigabytes, 0: the defaults of vtx-serve.
    """

    bundle: str
    replicas: int = 1
    max_replicas: int = 0
    up_seconds: float = 30.0
    down_seconds: float = 600.0
    cores: float = 1.0
    gpus: float = -1.0
    device: str = "auto"
    parallel: int = DEFAULTS.parallel
    queue: int = DEFAULTS.queue
    max_tokens: int = DEFAULTS.new_tokens
    kv_cache: float = 0.0
    memory: float = 0.0
    api_keys: str = ""

    def __post_init__(self) -> None:
        if self.replicas < 1 or (self.max_replicas and self.max_replicas < self.replicas):
            raise RequestError(
                f"replicas is {self.replicas} and max_replicas {self.max_replicas}; replicas must be at least 1, and "
                "max_replicas must not be below it"
            )
        for name in ("up_seconds", "down_seconds"):
            check_number(name, getattr(self, name), "a number of seconds of at least 0", least=0, most=1e6)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Fleet:
        """From the arguments of `serve run` or of its configuration. Raises RequestError."""
        kinds = {field.name: KINDS[str(field.type)] for field in fields(cls)}
        values = dict[str, Any]()
        for name, value in given.items():
            if name not in kinds:
                raise RequestError(f"there is no argument {name!r:.40}; there is {', '.join(kinds)}")
            try:
                values[name] = kinds[name](value)
            except (TypeError, ValueError) as e:
                raise RequestError(f"{name} is {value!r:.40}; it must be of type {kinds[name].__name__}") from e
        if "bundle" not in values:
            raise RequestError("no bundle is named; add bundle=DIR")
        return cls(**values)

    @property
    def bundles(self) -> dict[str, Path]:
        """The bundles by name, under absolute paths."""
        return {name: path.resolve() for name, path in named(tuple(self.bundle.split(","))).items()}

    @property
    def limits(self) -> Limits:
        """The limits of each replica."""
        kv = int(self.kv_cache * 1e9) or DEFAULTS.kv
        return Limits(parallel=self.parallel, queue=self.queue, new_tokens=self.max_tokens, kv=kv)

    def keys(self) -> Keys:
        """The keys of the file; none without one."""
        if not self.api_keys:
            return Keys({})
        file = Path(self.api_keys)
        return Keys(read_keys(utf8(read_text_file(file, 1 << 20), file.name, RequestError), file.name))
