"""The engines that graphs run on, by device. Imports nothing heavy: the help of commands lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What computes on a device: the module it needs, the dialect it reads, its arithmetic, the default first."""

    module: str
    extra: str
    dialect: str
    compute: tuple[str, ...]


ENGINES: Mapping[str, EngineSpec] = MappingProxyType(
    {
        "cpu": EngineSpec("onnxruntime", "cpu", "ort", ("f32",)),
        "openvino": EngineSpec("openvino", "openvino", "plain", ("f32", "bf16", "int8")),
        "cuda": EngineSpec("onnxruntime", "gpu", "ort", ("f32",)),
        "tensorrt": EngineSpec("cuda", "rtx", "trt", ("f16", "f32")),
    }
)
DEVICES = (AUTO, *ENGINES)
COMPUTE = tuple(dict.fromkeys(kind for engine in ENGINES.values() for kind in engine.compute))
