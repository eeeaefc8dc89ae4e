"""One matrix product as a bundle computes it: on its engine, with its kind of weights, in its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.bundle.spec.stored import BLOCK, INT8_ACTIVATIONS
from vtx.runtime.errors import DeviceError
from vtx.runtime.installing import install
from vtx.runtime.precision import PRECISIONS

DEVICES = tuple(device for device, engine in ENGINES.items() if not engine.gpu)
OPSETS = {"": 21, "com.microsoft": 1}
IR_VERSION = 10


def load_onnx() -> Any:
    try:
        import onnx
    except ImportError as e:
        raise DeviceError(
            f"onnx is not installed, so no graph can be read or written; {install('export')} "
            '(on a device that has TensorRT: "vtx-edge[rtx]", "vtx-edge[tensorrt]" or "vtx-edge[jetson]")'
        ) from e
    return onnx


@dataclass(frozen=True, slots=True)
class Kind:
    """Device, arithmetic and stored precision of a product: `stored` is int8, int4, or "float" for all others."""

    device: str
    compute: str
    stored: str

    @classmethod
    def of(cls, device: str, compute: str, precision: str) -> Kind:
        return cls(device, compute, precision if PRECISIONS[precision].bits else "float")

    def in_words(self) -> str:
        weights = "" if self.stored == "float" else f"{self.stored} weights, products of integers, "
        arithmetic = "a scale a token" if self.compute == "int8" else f"{self.compute} arithmetic"
        return f"{ENGINES[self.device].title}, {weights}{arithmetic}"


class Product:
    """[rows, depth] by [depth, width], `flops` FLOPs a call, by a constant; 64 divides `depth` of integers."""

    def __init__(self, kind: Kind, rows: int, depth: int, width: int, threads: int) -> None:
        graph = make_graph(kind, rows, depth, width)
        precision = "fp32" if kind.stored == "float" else kind.stored
        self._run = ENGINES[kind.device].load().product(graph, kind.compute, precision, threads)
        self._inputs = {"x": np.random.default_rng(1).standard_normal((rows, depth), np.float32)}
        self.flops = 2 * rows * depth * width

    def __call__(self) -> Any:
        """The product [rows, width] in the engine's own type of array."""
        return self._run(self._inputs)


def make_graph(kind: Kind, rows: int, depth: int, width: int) -> bytes:
    """The product from the input "x" to the output "y", in the engine's dialect; INT4 weights are two to a byte."""
    onnx = load_onnx()
    make = onnx.helper
    types = onnx.TensorProto
    rng = np.random.default_rng(0)

    def constant(name: str, dtype: int, shape: Sequence[int], values: np.typing.NDArray[Any]) -> Any:
        return make.make_tensor(name, dtype, shape, values.tobytes(), raw=True)

    def scales(*shape: int) -> Any:
        return constant("scales", types.FLOAT, shape, np.full(shape, 0.01, np.float32))

    bits = None if kind.stored == "float" else PRECISIONS[kind.stored].bits
    octets = rng.integers(0, 256, width * depth * (bits or 0) // 8, np.uint8)
    blocks = depth // BLOCK
    if bits is None:
        nodes = [make.make_node("MatMul", ("x", "w"), ["y"])]
        weights = rng.standard_normal((depth, width), np.float32)
        constants = [constant("w", types.FLOAT, (depth, width), weights)]
    elif ENGINES[kind.device].dialect == "ort":
        settings = {"K": depth, "N": width, "bits": bits, "block_size": BLOCK, "accuracy_level": INT8_ACTIVATIONS}
        nodes = [make.make_node("MatMulNBits", ("x", "w", "scales"), ["y"], domain="com.microsoft", **settings)]
        shape = (width, blocks, BLOCK * bits // 8)
        constants = [constant("w", types.UINT8, shape, octets), scales(width, blocks)]
    else:  # a scale per row for int8, per block for int4
        axis = {"axis": 0} if bits == 8 else {"axis": 1, "block_size": BLOCK}
        wide = make.make_node("DequantizeLinear", ("w", "scales"), ["wide"], **axis)
        nodes = [wide, make.make_node("Gemm", ("x", "wide"), ["y"], transB=1)]
        dtype = types.INT8 if bits == 8 else types.INT4
        constants = [constant("w", dtype, (width, depth), octets), scales(width, *([blocks] if bits == 4 else []))]
    x, y = (make.make_tensor_value_info(n, types.FLOAT, (rows, size)) for n, size in (("x", depth), ("y", width)))
    graph = make.make_graph(nodes, "graph", [x], [y], constants)
    opsets = [make.make_opsetid(domain, version) for domain, version in OPSETS.items()]
    written: bytes = make.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
    return written
