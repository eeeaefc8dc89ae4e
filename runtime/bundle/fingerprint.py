"""`engines.json`: the files and the machine that the engines of one target were built for.

    engines/<target>/engines.json    this record, written last
    engines/<target>/<graph>.engine  one engine a graph

TensorRT refuses an engine that does not fit without a reason. The errors here name the engines, this machine, and the
command that fixes it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from vtx.runtime.bundle.bundle import QUICK_BYTES, Bundle
from vtx.runtime.bundle.files import digest
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.bundle.seal import read_sealed
from vtx.runtime.bundle.spec.manifest import check_inside
from vtx.runtime.bundle.spec.names import TENSORRT
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.strict import Strict, write_json

FOLDER = "engines"
RECORD = "engines.json"
KERNELS = "kernels.cache"  # of TensorRT-RTX, compiled for one GPU and driver
FORMAT = 1
MAX_BYTES = 4 << 20
Range = tuple[int, int, int]  # the smallest, the most likely, the largest size
Profile = Mapping[str, Range]  # of each free size of a graph, such as rows


@dataclass(frozen=True, slots=True)
class Flavour:
    """One of the two forms of TensorRT: its name, and the extra that installs its module."""

    title: str
    extra: str


RTX = "tensorrt_rtx"
FLAVOURS = {"tensorrt": Flavour("TensorRT", "tensorrt"), RTX: Flavour("TensorRT-RTX", "rtx")}


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine: the bundle's files it was built from with their SHA-256, its own, and the sizes it takes."""

    file: str
    bytes: int
    sha256: str
    sources: dict[str, str]
    profiles: tuple[dict[str, Range], ...]

    def __post_init__(self) -> None:
        ranges = [bounds for profile in self.profiles for bounds in profile.values()]
        if self.bytes < 0 or not all(0 <= low <= likely <= high for low, likely, high in ranges):
            raise ValueError(f"the sizes of {self.file} are not sizes: they do not rise from 0")

    def longest(self, size: str) -> int:
        return max(profile[size][2] for profile in self.profiles)


@dataclass(frozen=True, slots=True)
class EngineSet:
    """The engines of one target, by graph; `flavour` is the Python module, `capability` as in (8, 9)."""

    format: int
    target: str
    flavour: str
    version: str
    capability: tuple[int, int]
    dialect: str
    precision: str
    workspace: int | None
    engines: dict[str, EngineRecord]

    def to_json(self) -> str:
        return write_json(self)

    @property
    def made_for(self) -> str:
        title = FLAVOURS[self.flavour].title if self.flavour in FLAVOURS else self.flavour
        return f"{title} {self.version} and compute capability {_dot(self.capability)}"


def read_engines(bundle: Bundle, target: str) -> EngineSet:
    """The engines of a target, as recorded; the files themselves are looked at by `open_engine`.

    They are built after a bundle was signed, so their record has a signature of its own, by the same key. Raises
    BundleError: there are none, the record is damaged, or not signed although the bundle must be.
    """
    where = f"{FOLDER}/{target}/{RECORD}"
    cure = build_command(bundle, target)
    if not bundle.files.exists(where):
        raise BundleError(f"{bundle.folder} holds no engines for {target}; {cure}")
    try:
        sealing = dataclasses.replace(bundle.files, cure=cure + (" --sign KEY" if bundle.key else ""))
        data = parse_json(read_sealed(sealing, where, MAX_BYTES, bundle.key), where, error=BundleError)
        engines = Strict(cure=cure).read(EngineSet, data, where)
    except ValueError as e:
        raise BundleError(f"{where} is damaged ({e}); {cure}") from e
    if engines.format != FORMAT:
        raise BundleError(f"{where} has format {engines.format}, this vtx reads {FORMAT}; {cure}")
    for record in engines.engines.values():
        check_inside(record.file, where)
    return engines


def targets(bundle: Bundle) -> list[str]:
    return sorted(path.parent.name for path in bundle.path(FOLDER).glob(f"*/{RECORD}"))


def check_machine(bundle: Bundle, engines: EngineSet, flavour: str, version: str, gpu: Gpu | None) -> None:
    if gpu is None:
        raise DeviceError(
            "no NVIDIA GPU answers here: its driver is not installed, or this is a container without it; "
            "install the driver (nvidia-smi shows it), or use --device cpu"
        )
    here = f"{FLAVOURS[flavour].title} {version} and compute capability {_dot(gpu.capability)} ({gpu.name})"
    if engines.dialect not in TENSORRT:
        raise DeviceError(
            f"the engines in {FOLDER}/{engines.target} are of the {engines.dialect!r} dialect, TensorRT runs those of "
            f"{' and '.join(TENSORRT)}; {build_command(bundle, 'this')}"
        )
    if engines.flavour == flavour and engines.version == version and engines.capability == gpu.capability:
        return
    raise DeviceError(
        f"the engines in {FOLDER}/{engines.target} were built for {engines.made_for}; "
        f"here is {here}; {build_command(bundle, 'this')}"
    )


def check_sources(bundle: Bundle, engines: EngineSet, graph: str) -> EngineRecord:
    """The record of a graph's engine, or BundleError if there is none or the bundle changed since it was built."""
    cure = build_command(bundle, engines.target)
    record = engines.engines.get(graph)
    if record is None:
        raise BundleError(f"{FOLDER}/{engines.target} holds no engine of {graph}; {cure}")
    for name, source in record.sources.items():
        checksum = bundle.manifest.files.get(name)
        if checksum is None or checksum.sha256 != source:
            raise BundleError(f"the engine {record.file} was built from another {name} than this bundle's; {cure}")
    return record


def open_engine(bundle: Bundle, engines: EngineSet, record: EngineRecord, *, whole: bool = False) -> BinaryIO:
    """The engine's file, open; its size and, up to 64 MB or with `whole`, its checksum are as recorded.

    Raises BundleError: the file is missing, of another size, altered, or no regular file of the bundle.
    """
    cure = build_command(bundle, engines.target)
    file = dataclasses.replace(bundle.files, cure=cure).open(f"{FOLDER}/{engines.target}/{record.file}")
    size = os.fstat(file.fileno()).st_size
    if size != record.bytes:
        file.close()
        problem = "it is cut short" if size < record.bytes else "it is too long"
        raise BundleError(f"{record.file} holds {size:,} bytes of {record.bytes:,}, {problem}; {cure}")
    hashed = whole or bundle.key is not None or size <= QUICK_BYTES
    if hashed and digest(file, record.file, BundleError) != record.sha256:
        file.close()
        raise BundleError(f"{record.file} was altered after it was built (its SHA-256 differs); {cure}")
    return file


def build_command(bundle: Bundle, target: str) -> str:
    return f"build them with: vtx-build --bundle {bundle.folder} --target {target}"


def _dot(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
