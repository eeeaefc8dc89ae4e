"""The opsets, operators and element types that each release of TensorRT reads, by its own documents.

Sources: onnx-tensorrt's `docs/operators.md` and `docs/Changelog.md` of the releases named below, NVIDIA's operator
pages (KVCacheUpdate, Attention) and, for TensorRT-RTX, the parser of 1.7.1, which reports what it reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vtx.runtime.bundle.fingerprint import FLAVOURS
from vtx.runtime.errors import RequestError

TENSORRT, RTX = FLAVOURS
Version = tuple[int, int]
OLDEST: dict[str, Version] = {TENSORRT: (10, 0), RTX: (1, 7)}  # that vtx supports
_WORDS = re.compile(r"\w+")

# operators.md: "9 to 20" in 10.0, "9 to 22" in 10.6, "9 to 24" in 10.15 and 11.2. Releases between say nothing new.
_CEILINGS: tuple[tuple[Version, int], ...] = ((OLDEST[TENSORRT], 20), ((10, 6), 22), ((10, 15), 24))
FLOOR = 9
# 10.0 is documented to 20, but lists INT4, which ONNX has since 21. For all other operators but one, 21 only added
# element types; 10.9 reads that one.
INT4_OPSET = 21
CHANGED_IN_21 = "GroupNormalization"

# Marked Y in operators.md of 10.6, less what came after 10.0.
_BASE = frozenset(
    _WORDS.findall(
        """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast CastLike
    Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace
    DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual
    GridSample GroupNormalization GRU HardSigmoid HardSwish Hardmax Identity If InstanceNormalization
    IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop LRN LSTM LpNormalization
    LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression
    NonZero Not OneHot Or Pad Pow PRelu QuantizeLinear RandomNormal RandomNormalLike RandomUniform
    RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RNN RoiAlign Round
    Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax
    Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose
    Trilu Unsqueeze Upsample Where Xor
    """
    )
)
# Changelog.md and the release notes of 11.0 and 11.2.
_SINCE: dict[str, Version] = {
    "DeformConv": (10, 1), "BlackmanWindow": (10, 4), "HammingWindow": (10, 4), "HannWindow": (10, 4), "STFT": (10, 5),
    "Attention": (10, 14), "RMSNormalization": (10, 15), "RotaryEmbedding": (10, 15), "TensorScatter": (10, 15),
    "Swish": (11, 0), "DFT": (11, 2),
}  # fmt: skip
# ONNX's operators by the parser of TensorRT-RTX 1.7.1 (`OnnxParser.supports_operator`).
_RTX_LACKS = frozenset({"DeformConv", "DFT"})
_RTX_ALSO = frozenset({"CausalConvWithState", "LinearAttention"})

_TYPES = frozenset(_WORDS.findall("FLOAT FLOAT16 BFLOAT16 DOUBLE INT64 INT32 INT8 INT4 UINT8 BOOL FLOAT8E4M3FN"))


@dataclass(frozen=True, slots=True)
class Release:
    """One release of one flavour: `flavour` is the Python module's name."""

    flavour: str
    version: Version

    @property
    def name(self) -> str:
        return f"{FLAVOURS[self.flavour].title} {self.version[0]}.{self.version[1]}"

    @property
    def has_attention(self) -> bool:
        """True if it reads all operators of `trt`: Attention, RMSNormalization and RotaryEmbedding."""
        return self.flavour == RTX or self.version >= _SINCE["RotaryEmbedding"]

    @property
    def dialect(self) -> str:
        return "trt" if self.has_attention else "trt10"

    @property
    def opset(self) -> int:
        """The highest opset that it is documented to read."""
        if self.flavour == RTX:
            return _CEILINGS[-1][1]
        return [ceiling for since, ceiling in _CEILINGS if self.version >= since][-1]

    @property
    def types(self) -> frozenset[str]:
        """ONNX's names of the element types that a value may have."""
        has_fp4 = self.flavour == RTX or self.version >= (10, 8)
        return _TYPES | {"FLOAT4E2M1"} if has_fp4 else _TYPES

    def since(self, operator: str) -> Version | None:
        """The release of this flavour that first read ONNX's `operator`; None if none does."""
        if self.flavour == RTX:
            operators = ((_BASE | _SINCE.keys()) - _RTX_LACKS) | _RTX_ALSO
            return OLDEST[RTX] if operator in operators else None
        return OLDEST[TENSORRT] if operator in _BASE else _SINCE.get(operator)


def parse_release(flavour: str, text: str) -> Release:
    """The release of a version such as 10.3.0.30 or 11; only major and minor count."""
    numbers = [int(part) if part.isdigit() else -1 for part in text.split(".")[:2]] + [0]
    version = (numbers[0], numbers[1])
    oldest = OLDEST[flavour]
    if min(version) < 0 or version < oldest:
        raise RequestError(
            f"{FLAVOURS[flavour].title} {text} is not supported; use {oldest[0]}.{oldest[1]} or a newer release"
        )
    return Release(flavour, version)
