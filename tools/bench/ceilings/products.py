"""One matrix product as a bundle computes it: on its engine, with its kind of weights, in its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.backends.openvino.backend import arithmetic, load_openvino
from vtx.runtime.backends.openvino.integers import bring_to_int8, multiply_integers
from vtx.runtime.backends.ort.library import load_onnxruntime, session_options
from vtx.runtime.bundle.spec.stored import BLOCK, INT8_ACTIVATIONS
from vtx.runtime.errors import DeviceError
from vtx.runtime.precision import PRECISIONS

if TYPE_CHECKING:
    import onnx

OPSETS, IR_VERSION = {"": 21, "com.microsoft": 1}, 10


def load_onnx() -> Any:
    """The module `onnx`, or DeviceError with the command that installs it."""
    try:
        import onnx
    except ImportError as e:
        raise DeviceError(
            'onnx is not installed, so no graph can be read or written; pip install "vtx-edge[export]" '
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
        if self.compute == "int8":
            return f"{ENGINES[self.device].title}, {weights}a scale a token"
        return f"{ENGINES[self.device].title}, {weights}{self.compute} arithmetic"


class Product:
    """[rows, depth] by [depth, width], `flops` FLOPs per call; the matrix is a constant, as weights are.

    `depth` is a multiple of 64 if the weights are integers.
    """

    def __init__(self, kind: Kind, rows: int, depth: int, width: int, threads: int) -> None:
        graph = GRAPHS[kind.device, kind.stored](kind, rows, depth, width)
        self._run: Callable[[Any], Any]
        if kind.device == "cpu":
            ort = load_onnxruntime()
            session = ort.InferenceSession(graph, session_options(ort, threads), providers=["CPUExecutionProvider"])
            self._run = lambda inputs: session.run(None, inputs)[0]
        else:
            self._run = _openvino(graph, kind, threads)
        self._inputs = {"x": np.random.default_rng(1).standard_normal((rows, depth), np.float32)}
        self.flops = 2 * rows * depth * width

    def __call__(self) -> Any:
        """The product [rows, width] in the engine's own type of array."""
        return self._run(self._inputs)


def _openvino(graph: bytes, kind: Kind, threads: int) -> Callable[[Any], Any]:
    core = load_openvino().Core()
    settings = arithmetic(kind.compute, "fp32" if kind.stored == "float" else kind.stored, threads)
    model = core.read_model(graph, b"")
    held = []
    if kind.compute == "int8":
        held = bring_to_int8(model)
        multiply_integers(model)
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def run(inputs: Any, _: Any = held) -> Any:  # the weights' memory, which only the engine reads
        request.infer(inputs, share_inputs=True, share_outputs=True)
        return request.get_tensor("y").data

    return run


def _model(nodes: Sequence[onnx.NodeProto], constants: Sequence[onnx.TensorProto], sizes: Sequence[int]) -> bytes:
    """The product of [rows, depth] by [depth, width], all three in `sizes`, from the input "x" to the output "y"."""
    helper, kind = load_onnx().helper, load_onnx().TensorProto.FLOAT
    rows, depth, width = sizes
    x = helper.make_tensor_value_info("x", kind, (rows, depth))
    y = helper.make_tensor_value_info("y", kind, (rows, width))
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], constants)
    written: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
    return written


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    node: onnx.NodeProto = load_onnx().helper.make_node(kind, inputs, [output], **attributes)
    return node


def _constant(name: str, kind: str, shape: Sequence[int], values: np.typing.NDArray[Any]) -> onnx.TensorProto:
    """A weight of ONNX's type `kind`, `values` as in memory (INT4: two to a byte)."""
    library = load_onnx()
    dtype = getattr(library.TensorProto, kind)
    tensor: onnx.TensorProto = library.helper.make_tensor(name, dtype, shape, values.tobytes(), raw=True)
    return tensor


def _floats(_: Kind, rows: int, depth: int, width: int) -> bytes:
    weights = _constant(
        "w", "FLOAT", (depth, width), np.random.default_rng(0).standard_normal((depth, width), np.float32)
    )
    return _model([_node("MatMul", ("x", "w"), "y")], [weights], (rows, depth, width))


def _octets(count: int) -> np.typing.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, count, np.uint8)


def _scales(*shape: int) -> onnx.TensorProto:
    return _constant("scales", "FLOAT", shape, np.full(shape, 0.01, np.float32))


def _in_blocks(kind: Kind, rows: int, depth: int, width: int) -> bytes:
    """As in the dialect `ort`."""
    bits, blocks = PRECISIONS[kind.stored].bits, depth // BLOCK
    assert bits is not None, "floats have other products"
    octets = _constant("w", "UINT8", (width, blocks, BLOCK * bits // 8), _octets(width * depth * bits // 8))
    attributes = {"K": depth, "N": width, "bits": bits, "block_size": BLOCK, "accuracy_level": INT8_ACTIVATIONS}
    node = _node("MatMulNBits", ("x", "w", "scales"), "y", domain="com.microsoft", **attributes)
    return _model([node], [octets, _scales(width, blocks)], (rows, depth, width))


def _dequantised(kind: Kind, rows: int, depth: int, width: int) -> bytes:
    """As in the dialect `plain`: a scale per row for int8, per block for int4."""
    attributes: Mapping[str, int]
    if PRECISIONS[kind.stored].bits == 8:
        weights = _constant("w", "INT8", (width, depth), _octets(width * depth))
        scales, attributes = _scales(width), {"axis": 0}
    else:
        weights = _constant("w", "INT4", (width, depth), _octets(width * depth // 2))
        scales, attributes = _scales(width, depth // BLOCK), {"axis": 1, "block_size": BLOCK}
    wide = _node("DequantizeLinear", ("w", "scales"), "wide", **attributes)
    product = _node("Gemm", ("x", "wide"), "y", transB=1)
    return _model([wide, product], [weights, scales], (rows, depth, width))


GRAPHS = {
    (device, stored): _floats if stored == "float" else quantised
    for device, quantised in (("cpu", _in_blocks), ("openvino", _dequantised))
    for stored in ("float", *(row.name for row in PRECISIONS.values() if row.bits))
}
