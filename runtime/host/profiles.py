"""Device presets: one TOML file a device in `vtx.profiles`, read strictly; every figure names its source."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from vtx.runtime.errors import RequestError
from vtx.runtime.strict import Strict, optional

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["jetson", "desktop", "cpu"]
FOLDER = "vtx.profiles"


class ProfileError(RequestError):
    """A profile is unknown, or its file is not a valid profile."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and its source: a vendor's document by title, or its derivation."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not self.value > 0 or self.value == float("inf"):
            raise ValueError(f"the value {self.value} is not a positive number")
        if not self.source.strip():
            raise ValueError(f"the value {self.value} has no source")


@dataclass(frozen=True, slots=True)
class JetPack:
    """A release of NVIDIA's system for Jetson that runs on the device, and the TensorRT in it."""

    version: str
    tensorrt: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One device, in the power mode named.

    `memory_gib` is all memory the processor can address, `system_gib` the part reserved for the system, the driver
    and the hardware, both in GiB. `bandwidth` is in GB/s (1e9). `fp32`, `fp16`, `int8` and
    `int4` are dense peaks in 1e12 operations a second, without sparsity and of the GPU alone (the CPU if
    there is none); `fp16` accumulates in fp32. None: no such arithmetic. `unified`: CPU and GPU share the memory.
    `modules` are the numbers by which a Jetson's device tree names it; a desktop card is known by its `name`.
    """

    name: str
    kind: Kind
    unified: bool
    power_mode: str
    compute_capability: str | None = optional(None)
    memory_gib: Figure
    system_gib: Figure
    bandwidth: Figure
    fp32: Figure
    fp16: Figure | None = optional(None)
    int8: Figure | None = optional(None)
    int4: Figure | None = optional(None)
    jetpack: tuple[JetPack, ...] = optional(())
    modules: tuple[str, ...] = optional(())

    def __post_init__(self) -> None:
        if self.system_gib.value >= self.memory_gib.value:
            raise ValueError("the system leaves no memory")
        if bool(self.jetpack) != (self.kind == "jetson"):
            raise ValueError("jetpack is required for Jetson profiles and forbidden elsewhere")
        if bool(self.modules) != (self.kind == "jetson"):
            raise ValueError("modules are required for Jetson profiles and forbidden elsewhere")

    @property
    def usable_bytes(self) -> int:
        """Memory for weights, caches and activations."""
        return int((self.memory_gib.value - self.system_gib.value) * (1 << 30))


def profile_names() -> tuple[str, ...]:
    """Names of all profiles, sorted."""
    entries = (entry.name for entry in files(FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


@cache
def load_profile(name: str) -> Profile:
    """The profile called `name`; ProfileError lists the known ones when there is none."""
    if name not in profile_names():
        raise ProfileError(f"no profile is called {name!r}; there are {', '.join(profile_names())}")
    return parse_profile((files(FOLDER) / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


def parse_profile(text: str, where: str) -> Profile:
    """Read a profile from TOML; unknown, missing and mistyped keys are ProfileErrors, a None is left out."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ProfileError(f"{where} is not TOML: {e}; correct the file") from e
    try:
        return Strict(ProfileError, "correct the file").read(Profile, data, where)
    except ValueError as e:
        raise ProfileError(f"{where}: {e}; correct the file") from e
