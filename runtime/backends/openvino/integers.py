"""Products of integers on OpenVINO: hidden states rounded to 8 bits, with a scale a token, by matrices of int8.

OpenVINO's CPU plugin multiplies integers if both sides are quantised by constants. So a token's hidden state is
divided by its own scale first, which gives values from -127 to 127, and these are rounded by one constant range; the
product is multiplied by the scale. This is the dynamic quantisation by token of LLM.int8() (arXiv 2208.07339,
section 2.1, "row-wise") without its outliers' part, and of SmoothQuant's O1 (arXiv 2211.10438, table 2).
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.openvino.nodes import product_like, replace_node
from vtx.runtime.errors import DeviceError

ON_DISK = "/var/tmp"  # by custom not in memory, as /tmp may be
LARGEST = 127  # of the integers of a quantised hidden state
_LEAST = 1e-30  # a hidden state of zeros is divided by this
_TO_A_CONSTANT = ("Convert", "Reshape", "Unsqueeze")
_ROWS = 512  # of a matrix that are converted at a time


def multiply_integers(model: Any) -> None:
    """Make every product with a matrix of int8 multiply integers. `model` is an openvino.Model and is changed.

    A matrix is [out, in] with a scale for each of its rows. Matrices of int4 and of floats are left alone.
    """
    from openvino import opset13 as ops

    rounded: dict[tuple[str, int], tuple[Any, Any]] = {}
    for product in model.get_ordered_ops():
        if product.get_type_name() != "MatMul" or _matrix_of("i8", product) is None:
            continue
        hidden = product.input_value(0)
        key = hidden.get_node().get_name(), hidden.get_index()
        if key not in rounded:  # several matrices multiply the same hidden states [..., width]
            largest = ops.reduce_max(ops.abs(hidden), ops.constant(np.array([-1])), keep_dims=True)
            largest = ops.maximum(largest, ops.constant(np.float32(_LEAST)))
            scaled = ops.multiply(hidden, ops.divide(ops.constant(np.float32(LARGEST)), largest))
            ends = ops.constant(np.float32(-LARGEST - 1)), ops.constant(np.float32(LARGEST))
            integers = ops.fake_quantize(scaled, *ends, *ends, 2 * LARGEST + 2)
            rounded[key] = integers, ops.multiply(largest, ops.constant(np.float32(1 / LARGEST)))
        integers, scale = rounded[key]
        replace_node(product, ops.multiply(product_like(product, integers, product.input_value(1)), scale))
    model.validate_nodes_and_infer_types()


def bring_to_int8(model: Any) -> list[NDArray[np.int8]]:
    """Convert matrices of int4 to int8 with a scale a row. `model` is changed.

    Returns the new matrices, which must live as long as what is compiled from the model: it does not hold them.

    An integer of a block becomes the nearest int8 to its value by the row's scale: the rounding error is at most half
    of 1/127 of the largest weight of its row. The new matrices are in a temporary file without a name: its pages need
    not stay in memory once the engine has packed them. Raises DeviceError: the file cannot be written.
    """
    from openvino import Tensor
    from openvino import opset13 as ops

    matrices: list[NDArray[np.int8]] = []
    folder = os.environ.get("TMPDIR") or (ON_DISK if os.access(ON_DISK, os.W_OK) else None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for product in model.get_ordered_ops():
                parts = _matrix_of("i4", product) if product.get_type_name() == "MatMul" else None
                if parts is None:
                    continue
                octets, scales = (part.get_tensor_view().data for part in parts)
                height = len(scales)  # of one axis if each row is a single block
                integers, wide = in_int8(octets.view(np.uint8).reshape(height, -1), scales.reshape(height, -1))
                offset = file.seek(0, os.SEEK_END)
                file.write(integers.data)
                file.flush()
                # OpenVINO refuses read-only ones
                matrices.append(np.memmap(file, np.int8, "r+", offset, integers.shape))
                matrix = ops.constant(Tensor(matrices[-1], shared_memory=True))
                weights = ops.multiply(ops.convert(matrix, "f32"), ops.constant(wide[:, None]))
                product.input(1).replace_source_output(weights.output(0))
    except OSError as e:
        raise DeviceError(
            f"{folder or tempfile.gettempdir()} cannot take the weights in int8 ({e}); set TMPDIR to a folder with "
            "room for a byte a weight, or leave out --compute int8"
        ) from e
    model.validate_nodes_and_infer_types()
    return matrices


def in_int8(octets: NDArray[np.uint8], scales: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix of int4, `octets` [out, in / 2], lower half first, `scales` [out, blocks], in int8, a scale a row."""
    rows, blocks = scales.shape
    scales = scales.astype(np.float32)
    integers = np.empty((rows, 2 * octets.shape[1]), np.int8)
    wide = np.empty(rows, np.float32)
    for first in range(0, rows, _ROWS):
        part = slice(first, first + _ROWS)
        halves = np.stack([(octets[part] << 4).view(np.int8) >> 4, octets[part].view(np.int8) >> 4], axis=-1)
        parts = halves.reshape(len(halves), blocks, -1)
        largest = (np.abs(parts).max(2) * scales[part]).max(1)
        wide[part] = np.where(largest > 0, largest / LARGEST, 1)
        factors = scales[part] / wide[part, None]
        integers[part] = np.rint(parts * factors[:, :, None]).reshape(len(halves), -1)
    return integers, wide


def _matrix_of(kind: str, product: Any) -> tuple[Any, Any] | None:
    """The constants of a product's matrix [out, in]: its integers and its scales. None unless they are of `kind`."""
    node = product.input_value(1).get_node()
    if node.get_type_name() == "Reshape":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Multiply":
        return None
    constants = []
    for side in (0, 1):
        constant = node.input_value(side).get_node()
        while constant.get_type_name() in _TO_A_CONSTANT:
            constant = constant.input_value(0).get_node()
        if constant.get_type_name() != "Constant":
            return None
        constants.append(constant)
    integers, scales = constants
    return (integers, scales) if integers.get_element_type().get_type_name() == kind else None
