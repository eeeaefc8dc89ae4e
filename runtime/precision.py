"""Types of weights, of K and V and of arithmetic: one row each, with every fact that depends on it.

A new precision is a row here, its rounding in `exporter/weights/quantize.py`, and its product in
`exporter/graphs/builder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored.

    `stored`: safetensors' word for the type of a matrix. `bits` of a quantised weight, None where weights are floats.
    `arithmetic`: numpy's name of the type that graphs compute in where they say it. `tolerance`: the largest difference
    to the float32 reference with the same weights, as a share of its largest magnitude; quantised matrices are
    multiplied with activations of 8 bits. `openvino_hidden`: the least hidden size at which OpenVINO was measured to be
    ahead of onnxruntime on a CPU (docs/how-to/openvino.md).
    """

    name: str
    stored: str
    bits: int | None
    arithmetic: str
    tolerance: float
    openvino_hidden: int

    @property
    def expands(self) -> bool:
        """Whether onnxruntime's CPU provider holds such weights in float32, more bytes than are stored."""
        return self.bits is None and self.stored != "F32"


@dataclass(frozen=True, slots=True)
class KVType:
    """How K and V are kept: numpy's name of the type, bytes a number, and the tolerance as of `Precision`."""

    name: str
    dtype: str
    bytes: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What an engine computes in: the precision that it brings floating-point weights to, and the tolerance.

    What int8 does to quantised matrices is in their own tolerance.
    """

    name: str
    weights: str
    bytes: int
    tolerance: float


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        row.name: row
        for row in (
            Precision("fp32", "F32", None, "float32", 1e-4, 2048),
            Precision("fp16", "F16", None, "float16", 1e-2, 896),
            Precision("bf16", "BF16", None, "bfloat16", 1e-2, 896),
            Precision("int8", "I8", 8, "float16", 0.15, 896),
            Precision("int4", "I4", 4, "float16", 0.15, 896),
        )
    }
)
KV_TYPES: Mapping[str, KVType] = MappingProxyType(
    {
        row.name: row
        for row in (
            KVType("fp32", "float32", 4, 0.0),
            KVType("fp16", "float16", 2, 5e-3),
            KVType("int8", "int8", 1, 0.15),
        )
    }
)
KV_DTYPES: Mapping[str, KVType] = MappingProxyType({row.dtype: row for row in KV_TYPES.values()})
ARITHMETIC: Mapping[str, Arithmetic] = MappingProxyType(
    {
        row.name: row
        for row in (
            Arithmetic("f32", "fp32", 4, 0.0),
            Arithmetic("bf16", "bf16", 2, 5e-2),
            Arithmetic("f16", "fp16", 2, 1e-2),
            Arithmetic("int8", "fp32", 4, 5e-2),
        )
    }
)
