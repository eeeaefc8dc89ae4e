"""Types of weights, of K and V and of arithmetic: one row each, with every fact that depends on the type.

A new precision of weights is a row here, its rounding in `exporter/weights/quantize.py`, and its product in
`exporter/graphs/builder.py`; libvtx has its name in `runtime/cpp/src/bundle/manifest.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Precision:
    """A type of stored weights.

    `stored`: the safetensors dtype of a matrix. `bits` of a quantised weight, None for floats. `arithmetic`: numpy's
    name of the type that graphs compute in if they state one. `tolerance`: the largest difference to the float32
    reference with the same weights, as a share of its largest magnitude; quantised matrices are multiplied with
    activations of 8 bits. `other_parts`: the default precision of tower and head next to such a decoder; `kv`: the
    default type of K and V. `opset`: the first of ONNX whose standard operators read such weights.

    On OpenVINO: `openvino_hidden` is the smallest hidden size at which it was measured to be faster than onnxruntime
    on a CPU (docs/how-to/openvino.md). `openvino_group`: values of a hidden state that share a scale in products of
    integers; 0: products are of floats. `openvino_tokens`: the most tokens of one run of a stage, by arithmetic, if
    longer runs were measured to be slower (docs/measurements/results/openvino.jsonl).
    """

    name: str
    stored: str
    bits: int | None
    arithmetic: str
    tolerance: float
    other_parts: str
    kv: str
    openvino_hidden: int
    openvino_group: int = 0
    openvino_tokens: Mapping[str, int] = field(default_factory=dict)
    opset: int = 17

    @property
    def expands(self) -> bool:
        """True if onnxruntime's CPU provider holds such weights in float32, more bytes than are stored."""
        return self.bits is None and self.stored != "F32"


@dataclass(frozen=True, slots=True)
class KVType:
    """A type of stored K and V: numpy's and OpenVINO's names of it, bytes per number, and `Precision`'s tolerance.

    `scaled`: K and V are integers times a scale for each channel.
    """

    name: str
    dtype: str
    openvino: str
    bytes: int
    tolerance: float
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of an engine: the precision that it converts floating-point weights to, and the tolerance.

    The tolerance of quantised matrices covers int8.
    """

    name: str
    weights: str
    bytes: int
    tolerance: float


PRECISIONS: Mapping[str, Precision] = {
    row.name: row
    for row in (
        Precision("fp32", "F32", None, "float32", 1e-4, "fp32", "fp32", 2048),
        Precision("fp16", "F16", None, "float16", 1e-2, "fp16", "fp16", 896),
        Precision("bf16", "BF16", None, "bfloat16", 1e-2, "bf16", "fp16", 896),
        Precision("int8", "I8", 8, "float16", 0.15, "int8", "fp16", 896, 128, {"bf16": 256}),
        Precision("int4", "I4", 4, "float16", 0.15, "int8", "fp16", 896, 64, {"f32": 256, "bf16": 256}, 21),
    )
}
STORED: Mapping[str, Precision] = {row.stored: row for row in PRECISIONS.values()}
KV_TYPES: Mapping[str, KVType] = {
    row.name: row
    for row in (
        KVType("fp32", "float32", "f32", 4, 0.0),
        KVType("fp16", "float16", "f16", 2, 5e-3),
        KVType("int8", "int8", "u8", 1, 0.15, scaled=True),
    )
}
KV_DTYPES: Mapping[str, KVType] = {row.dtype: row for row in KV_TYPES.values()}
ARITHMETIC: Mapping[str, Arithmetic] = {
    row.name: row
    for row in (
        Arithmetic("f32", "fp32", 4, 0.0),
        Arithmetic("bf16", "bf16", 2, 5e-2),
        Arithmetic("f16", "fp16", 2, 1e-2),
        Arithmetic("int8", "fp32", 4, 5e-2),
    )
}
