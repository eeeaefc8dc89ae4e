"""Products of integers on OpenVINO: hidden states rounded to 8 bits, with a scale a token, by matrices of int8.

OpenVINO's CPU plugin multiplies integers where both sides are quantised by constants. So a token's hidden state is
divided by its own scale first, which leaves values from -127 to 127, and those are rounded by one constant range; its
scale is multiplied back behind the product. This is the dynamic quantisation by token of LLM.int8() (arXiv 2208.07339,
section 2.1, "row-wise") without its outliers' part, and of SmoothQuant's O1 (arXiv 2211.10438, table 2).
"""

from __future__ import annotations

import os
import tempfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import DeviceError

ON_DISK = "/var/tmp"  # by custom not in memory, as /tmp may be
LARGEST = 127  # of the integers that stand for a hidden state
_LEAST = 1e-30  # a hidden state of zeros is divided by this
_ON_THE_WAY = ("Convert", "Reshape", "Unsqueeze")
_ROWS = 512  # of a matrix that are brought to int8 at a time


def multiply_integers(model: Any) -> None:
    """Have every product with a matrix of int8 multiply integers. `model` is an openvino.Model and is changed.

    A matrix is [out, in] with a scale for each of its rows. Matrices of int4 and of floats are left alone.
    """
    rounded: dict[tuple[str, int], tuple[Any, Any]] = {}
    for product in model.get_ordered_ops():
        if product.get_type_name() != "MatMul" or _matrix_of("i8", product) is None:
            continue
        hidden = product.input_value(0)
        key = hidden.get_node().get_name(), hidden.get_index()
        if key not in rounded:  # several matrices multiply the same hidden states
            rounded[key] = _rounded(hidden)
        _multiply(product, *rounded[key])
    model.validate_nodes_and_infer_types()


def bring_to_int8(model: Any) -> list[NDArray[np.int8]]:
    """Have matrices of int4 become int8 with a scale a row. `model` is changed.

    Returns the new matrices, which must live as long as what is compiled from the model: it does not hold them.

    An integer of a block becomes the nearest int8 to its value by the row's scale: what is rounded anew is at most half
    of 1/127 of the largest weight of its row. The new matrices lie in a temporary file without a name: its pages need
    not stay in memory once the engine has packed them.

    Raises:
        DeviceError: the file cannot be written.

    """
    from openvino import Tensor
    from openvino import opset13 as ops

    made = []
    folder = os.environ.get("TMPDIR") or (ON_DISK if os.access(ON_DISK, os.W_OK) else None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for product in model.get_ordered_ops():
                parts = _matrix_of("i4", product) if product.get_type_name() == "MatMul" else None
                if parts is None:
                    continue
                octets, scales = (part.get_tensor_view().data for part in parts)
                rows = len(scales)  # of one axis where each row is a single block
                integers, wide = in_int8(octets.view(np.uint8).reshape(rows, -1), scales.reshape(rows, -1))
                made.append(_written(file, integers))
                matrix = ops.constant(Tensor(made[-1], shared_memory=True))
                weights = ops.multiply(ops.convert(matrix, "f32"), ops.constant(wide[:, None]))
                product.input(1).replace_source_output(weights.output(0))
    except OSError as e:
        raise DeviceError(
            f"{folder or tempfile.gettempdir()} cannot take the weights in int8 ({e}); set TMPDIR to a folder with "
            "room for a byte a weight, or leave out --compute int8"
        ) from e
    model.validate_nodes_and_infer_types()
    return made


def _written(file: IO[bytes], integers: NDArray[np.int8]) -> NDArray[np.int8]:
    """A matrix as it lies at the end of a file, to which it is written."""
    place = file.seek(0, os.SEEK_END)
    file.write(integers.data)
    file.flush()
    return np.memmap(file, np.int8, "r+", place, integers.shape)  # OpenVINO takes none that is read-only


def in_int8(octets: NDArray[np.uint8], scales: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix of int4 in int8: integers [out, in], scales [out].

    `octets` [out, in / 2] hold two int4 each, the lower half first; `scales` are [out, blocks].
    """
    rows, blocks = scales.shape
    scales = scales.astype(np.float32)
    integers = np.empty((rows, 2 * octets.shape[1]), np.int8)
    wide = np.empty(rows, np.float32)
    for first in range(0, rows, _ROWS):
        part = slice(first, first + _ROWS)
        halves = np.stack([(octets[part] << 4).view(np.int8) >> 4, octets[part].view(np.int8) >> 4], axis=-1)
        apart = halves.reshape(len(halves), blocks, -1)
        largest = (np.abs(apart).max(2) * scales[part]).max(1)
        wide[part] = np.where(largest > 0, largest / LARGEST, 1)
        factors = scales[part] / wide[part, None]
        integers[part] = np.rint(apart * factors[:, :, None]).reshape(len(halves), -1)
    return integers, wide


def _rounded(hidden: Any) -> tuple[Any, Any]:
    """Integers from -127 to 127 in place of hidden states [..., width], and what they are to be multiplied by."""
    from openvino import opset13 as ops

    largest = ops.reduce_max(ops.abs(hidden), ops.constant(np.array([-1])), keep_dims=True)
    largest = ops.maximum(largest, ops.constant(np.float32(_LEAST)))
    scaled = ops.multiply(hidden, ops.divide(ops.constant(np.float32(LARGEST)), largest))
    ends = ops.constant(np.float32(-LARGEST - 1)), ops.constant(np.float32(LARGEST))
    integers = ops.fake_quantize(scaled, *ends, *ends, 2 * LARGEST + 2)
    return integers, ops.multiply(largest, ops.constant(np.float32(1 / LARGEST)))


def _multiply(product: Any, integers: Any, scale: Any) -> None:
    from openvino import opset13 as ops

    turned = (product.get_attributes()[name] for name in ("transpose_a", "transpose_b"))
    exact = ops.multiply(ops.matmul(integers, product.input_value(1), *turned), scale).output(0)
    exact.get_tensor().set_names(product.output(0).get_names())  # of a graph's output
    for end in product.output(0).get_target_inputs():
        end.replace_source_output(exact)


def _matrix_of(kind: str, product: Any) -> tuple[Any, Any] | None:
    """The constants of a matrix of integers, and of its scales, that a product is by. None where it is another."""
    parts = _quantised(product.input_value(1))
    return parts if parts and parts[0].get_element_type().get_type_name() == kind else None


def _quantised(weights: Any) -> tuple[Any, Any] | None:
    """The constants of which a matrix [out, in] is the product: its integers and its scales. None for floats."""
    node = weights.get_node()
    if node.get_type_name() == "Reshape":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Multiply":
        return None
    integers, scales = (_constant(node.input_value(side)) for side in (0, 1))
    return None if integers is None or scales is None else (integers, scales)


def _constant(value: Any) -> Any:
    """The constant that a value is, but for its shape and its type; None where it is none."""
    node = value.get_node()
    while node.get_type_name() in _ON_THE_WAY:
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None
