"""Device presets: one TOML file a device, read strictly; every figure names its source.

This package stands below the runtime and knows none of its errors: what it raises is `ProfileError`.
"""

from __future__ import annotations

import sys
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar, cast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["jetson", "desktop", "cpu"]
T = TypeVar("T")


class ProfileError(ValueError):
    """A profile is unknown, or its file is not what a profile must be."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it comes from: a vendor's document by title, or how it was worked out."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not self.value > 0 or self.value == float("inf"):
            raise ProfileError(f"the value {self.value} is not a positive number")
        if not self.source.strip():
            raise ProfileError(f"the value {self.value} has no source")


@dataclass(frozen=True, slots=True)
class JetPack:
    """A release of NVIDIA's system for Jetson that runs on the device, and the TensorRT in it."""

    version: str
    tensorrt: str
    source: str


@dataclass(frozen=True, slots=True)
class Profile:
    """One device, in the power mode named.

    `memory_gib` is all memory the processor can address, `system_gib` what is kept for the system, the driver
    and what the hardware sets aside, both in GiB. `bandwidth` is in GB/s (1e9). `fp32`, `fp16`, `int8` and
    `int4` are dense peaks in 1e12 operations a second, without sparsity and of the GPU alone (the CPU where
    there is none); `fp16` accumulates in fp32. None: no such arithmetic. `unified`: CPU and GPU share the memory.
    `modules` are the numbers by which a Jetson's device tree names it; a desktop card is known by its `name`.
    """

    name: str
    kind: Kind
    unified: bool
    power_mode: str
    compute_capability: str | None
    memory_gib: Figure
    system_gib: Figure
    bandwidth: Figure
    fp32: Figure
    fp16: Figure | None
    int8: Figure | None
    int4: Figure | None
    jetpack: tuple[JetPack, ...]
    modules: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in typing.get_args(Kind):
            raise ProfileError(f"kind is {self.kind!r}, not one of {', '.join(typing.get_args(Kind))}")
        if self.system_gib.value >= self.memory_gib.value:
            raise ProfileError("the system leaves no memory")
        if bool(self.jetpack) != (self.kind == "jetson"):
            raise ProfileError("a JetPack is named for a Jetson, and for nothing else")
        if bool(self.modules) != (self.kind == "jetson"):
            raise ProfileError("a Jetson has the numbers of its modules, and nothing else has")

    @property
    def usable_bytes(self) -> int:
        """Memory for weights, caches and activations."""
        return int((self.memory_gib.value - self.system_gib.value) * (1 << 30))


def profile_names() -> tuple[str, ...]:
    """Names of all profiles, sorted."""
    entries = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


@cache
def load_profile(name: str) -> Profile:
    """The profile called `name`; ProfileError lists the known ones when there is none."""
    if name not in profile_names():
        raise ProfileError(f"no profile is called {name!r}; there are {', '.join(profile_names())}")
    return parse_profile((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


def parse_profile(text: str, where: str) -> Profile:
    """Read a profile from TOML; unknown, missing and mistyped keys are ProfileErrors, a None is left out."""
    try:
        return _read(Profile, tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as e:
        raise ProfileError(f"{where} is not TOML: {e}") from e


def _read(kind: type[T], data: Any, where: str) -> T:
    if not isinstance(data, dict):
        raise ProfileError(f"{where} is a {type(data).__name__}, not a table")
    hints = typing.get_type_hints(kind)
    needed = {name for name, hint in hints.items() if not _optional(hint)}
    unknown, missing = sorted(set(data) - set(hints)), sorted(needed - set(data))
    if unknown or missing:
        problem = f"unknown key {unknown[0]!r}" if unknown else f"key {missing[0]!r} is missing"
        raise ProfileError(f"{where}: {problem}")
    values = {f.name: _value(hints[f.name], data.get(f.name), f"{where}: {f.name}") for f in fields(cast(Any, kind))}
    try:
        return kind(**values)
    except ProfileError as e:
        raise ProfileError(f"{where}: {e}") from e


def _optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is tuple


def _value(hint: Any, data: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if data is None else _value(typing.get_args(hint)[0], data, where)
    if typing.get_origin(hint) is tuple:
        items = [] if data is None else data
        if isinstance(items, list):
            return tuple(_value(typing.get_args(hint)[0], item, where) for item in items)
    elif is_dataclass(hint):
        return _read(cast(type, hint), data, where)
    elif hint is float and type(data) in (int, float):
        return float(data)
    elif type(data) is (str if typing.get_origin(hint) is Literal else hint):
        return data
    raise ProfileError(f"{where} is {str(data)[:60]!r}, not {getattr(hint, '__name__', hint)}")
