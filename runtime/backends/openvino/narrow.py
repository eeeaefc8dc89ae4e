"""Weights of `plain` graphs on OpenVINO: as narrow as the bundle stores them, and once in memory."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import drop_pages
from vtx.runtime.backends.openvino.nodes import kind_of, product_like, readers_of, replace, replace_node

MARK = "decompression_0"  # the plugin leaves a conversion with this mark to the operator that reads it
NARROW = ("f16", "bf16")
LEAST_BLOCK = 64  # of integers, for which activations get a scale of their own
_SECONDS = 0.02  # between two releases of pages: little is read again meanwhile


def keep_narrow(model: Any, compute: str) -> None:
    """Keep matrices of float16, bfloat16 and integers narrow: products widen their values as they read them.

    OpenVINO would else widen them while it compiles, and keep float32 next to the packed form that it computes with.
    If it computes in bfloat16, matrices of bfloat16 are multiplied as they are: the kernel that widens values as it
    reads them is slower. `model` is an openvino.Model and is changed.
    """
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind in ("Convert", "Gather") and _is_narrow_matrix(node.input_value(0)):
            readers = readers_of(node.output(0))
            kinds = {reader.get_type_name() for reader in readers}
            if kind == "Convert" and kinds == {"MatMul"}:
                _keep_matrix(node, readers, compute)
            elif kind == "Gather" and kinds == {"Convert"}:
                _keep_table(node, readers)
        elif kind == "MatMul" and {kind_of(value) for value in node.input_values()} == {"Reshape", "Multiply"}:
            _multiply_unshaped(node)
    model.validate_nodes_and_infer_types()


def _is_narrow_matrix(value: Any) -> bool:
    narrow = value.get_element_type().get_type_name() in NARROW
    return narrow and kind_of(value) == "Constant" and len(value.get_partial_shape()) == 2


def _keep_matrix(conversion: Any, products: Sequence[Any], compute: str) -> None:
    """Keep a matrix narrow whose `conversion` products read."""
    from openvino import opset13 as ops

    matrix = conversion.input_value(0)
    if not compute == "bf16" == matrix.get_element_type().get_type_name():
        conversion.get_rt_info()[MARK] = ""
        return
    for product in products:
        in_bf16 = product_like(product, ops.convert(product.input_value(0), "bf16"), matrix)
        replace_node(product, ops.convert(in_bf16, "f32"))


def _keep_table(gather: Any, conversions: Sequence[Any]) -> None:
    """Keep a table narrow of which rows are widened: the rows that are known, or those that are gathered."""
    from openvino import opset13 as ops

    if kind_of(gather.input_value(1)) == "Constant":
        for conversion in conversions:
            replace(conversion.output(0), ops.constant(_known_rows(gather)).output(0))
        return
    wide = ops.convert(gather.input_value(0), "f32")
    wide.get_rt_info()[MARK] = ""
    rows = ops.gather(wide, gather.input_value(1), gather.input_value(2))
    for conversion in conversions:
        replace(conversion.output(0), rows.output(0))


def _known_rows(gather: Any) -> NDArray[np.float32]:
    """Rows of a table of float16 or bfloat16 whose numbers are in the graph.

    To gather them while it compiles, OpenVINO would widen the whole table: Gemma 4 E2B's inputs to layers, of which the
    tower's graph reads one row, from 4.7 to 9.4 GB.
    """
    table, numbers = (gather.input_value(n).get_node() for n in (0, 1))
    rows: NDArray[np.uint16] = table.get_tensor_view().data.view(np.uint16)[numbers.data]
    if table.get_element_type().get_type_name() == "bf16":
        return np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)
    return rows.view(np.float16).astype(np.float32)


def weight_block(model: Any) -> int | None:
    """The number of integers of a row that share a scale: the least of all matrices, at least `LEAST_BLOCK`.

    None if no matrix has such blocks.
    """
    constants = (node for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    matrices = (node for node in constants if node.get_element_type().get_type_name() in ("i4", "i8"))
    readers = [reader for node in matrices for reader in readers_of(node.output(0))]
    blocks = [
        node.get_output_partial_shape(0)[-1].get_length() for node in readers if node.get_type_name() == "Reshape"
    ]
    return min((block for block in blocks if block >= LEAST_BLOCK), default=None)


def _multiply_unshaped(product: Any) -> None:
    """Remove the reshape of [images, tokens, width] to [images * tokens, width] before a product with scaled integers.

    OpenVINO moves such a reshape behind the product, and then multiplies the integers by their scales. It stays if the
    number of tokens depends on the image, in towers of free sizes: there OpenVINO keeps the integers, and the nodes
    that follow have no axis of images. It also stays if the product, but for its bias, is an output of the graph.
    """
    joined = product.input_value(0)
    unjoined = joined.get_node().input_value(0)
    before = unjoined.get_partial_shape()
    after = joined.get_partial_shape()
    joins = len(before) == 3 and before[1].is_static and len(after) == 2
    if not joins or before[2] != after[1] or after[1].is_dynamic:
        return
    node = product
    while node.get_type_name() in ("MatMul", "Add", "Multiply"):
        readers = readers_of(node.output(0))
        if len(readers) != 1:
            break
        node = readers[0]
    if node.get_type_name() != "Result":
        product.input(0).replace_source_output(unjoined)


@contextmanager
def releasing_pages(model: Any) -> Iterator[None]:
    """Keep pages of the weights' files that are read within from staying resident, on Linux.

    For the time in which the engine packs them: each page is read once, and the engine computes with the packed form.
    The files stay mapped and can be read again. `model` is an openvino.Model read from files, or None.
    """
    mapped = _mapped(model) if model is not None and sys.platform == "linux" else []
    if not mapped:
        yield
        return
    done = threading.Event()

    def release() -> None:
        for first, length in mapped:
            drop_pages(first, length)

    def watch() -> None:
        while not done.wait(_SECONDS):
            release()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        release()


def _mapped(model: Any) -> list[tuple[int, int]]:
    """First address and size of each shared file mapping that holds a constant of the model.

    The model keeps them mapped as long as it exists, so no other mapping can take these addresses.
    """
    constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    addresses = sorted(node.get_tensor_view().data.__array_interface__["data"][0] for node in constants)
    mappings = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            bounds, rights, _, _, inode, *_ = line.split(maxsplit=5)
            if rights[-1] != "s" or inode == "0":
                continue
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            if bisect_left(addresses, first) < bisect_left(addresses, end):
                mappings.append((first, end - first))
    return mappings
