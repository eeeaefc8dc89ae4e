"""Weights of `plain` graphs on OpenVINO: as narrow as the bundle holds them, and once in memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARK = "decompression_0"  # the plugin leaves a conversion that bears this to the operator that reads it
NARROW = ("f16", "bf16")
LEAST_BLOCK = 64  # of int4 weights, for which activations get a scale of their own
_MADV_DONTNEED = 4
_SECONDS = 0.02  # between two looks: little is read anew meanwhile


def keep_narrow(model: Any, compute: str) -> None:
    """Have matrices of float16, bfloat16 and integers stay such: who multiplies by them widens a value as it is read.

    OpenVINO would else widen them while it compiles, and keep that in float32 beside the packed form it computes with.
    Where it computes in bfloat16, matrices of bfloat16 are multiplied as what they are: the kernel that widens values
    as it reads them is slower. `model` is an openvino.Model and is changed.
    """
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "Convert" and _is_narrow_matrix(node.input_value(0)) and _readers(node) == {"MatMul"}:
            if compute == "bf16" == node.input_value(0).get_element_type().get_type_name():
                _multiply_in_bfloat16(node)
            else:
                node.get_rt_info()[MARK] = ""
        elif kind == "Gather" and _is_narrow_matrix(node.input_value(0)) and _readers(node) == {"Convert"}:
            _widen_table(node)
        elif kind == "MatMul" and {_kind(value) for value in node.input_values()} == {"Reshape", "Multiply"}:
            _multiply_unshaped(node)
    model.validate_nodes_and_infer_types()


def int4_block(model: Any) -> int:
    """How many int4 weights of a row share a scale: the least of its matrices, and no less than `LEAST_BLOCK`.

    A matrix [out, in] is split into blocks by a reshape, [out, in / block, block].
    """
    constants = (node for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    matrices = (node for node in constants if node.get_element_type().get_type_name() == "i4")
    apart = [reader.get_node() for node in matrices for reader in node.output(0).get_target_inputs()]
    blocks = [node.get_output_partial_shape(0)[-1].get_length() for node in apart if node.get_type_name() == "Reshape"]
    return min((block for block in blocks if block >= LEAST_BLOCK), default=LEAST_BLOCK)


def _widen_table(gather: Any) -> None:
    """Mark as widened, where its rows are, a table whose rows are widened once they are gathered: it stays narrow."""
    from openvino import opset13 as ops

    wide = ops.convert(gather.input_value(0), "f32")
    wide.get_rt_info()[MARK] = ""
    rows = ops.gather(wide, gather.input_value(1), gather.input_value(2))
    for reader in gather.output(0).get_target_inputs():
        for end in reader.get_node().output(0).get_target_inputs():
            end.replace_source_output(rows.output(0))


def _multiply_in_bfloat16(widened: Any) -> None:
    """Have whoever multiplies by a widened bfloat16 matrix multiply by the matrix itself."""
    from openvino import opset13 as ops

    for reader in widened.output(0).get_target_inputs():
        product = reader.get_node()
        sides = [ops.convert(product.input_value(0), "bf16").output(0), widened.input_value(0)]
        narrow = ops.matmul(*sides, *(product.get_attributes()[name] for name in ("transpose_a", "transpose_b")))
        wide = ops.convert(narrow, "f32").output(0)
        wide.get_tensor().set_names(product.output(0).get_names())  # of a graph's output
        for end in product.output(0).get_target_inputs():
            end.replace_source_output(wide)


def _multiply_unshaped(product: Any) -> None:
    """Leave out the joining of [images, rows, width] to [images * rows, width] before a product with scaled integers.

    OpenVINO moves such a joining behind the product, and multiplies the integers by their scales when it does. Rows
    whose number only the image says, in towers at its own size, stay as they are: OpenVINO keeps their integers, and
    what follows has no axis of images. Neither has what a graph gives out.
    """
    joined = product.input_value(0)
    rows = joined.get_node().input_value(0)
    before, after = rows.get_partial_shape(), joined.get_partial_shape()
    joins = (
        len(before) == 3 and before[1].is_static and len(after) == 2 and before[2] == after[1] and after[1].is_static
    )
    if joins and not _is_given_out(product):
        product.input(0).replace_source_output(rows)


def _is_given_out(node: Any) -> bool:
    """Whether a product, but for its bias, is an output of the graph."""
    while node.get_type_name() in ("MatMul", "Add", "Multiply"):
        ends = node.output(0).get_target_inputs()
        if len(ends) != 1:
            return False
        node = next(iter(ends)).get_node()
    return bool(node.get_type_name() == "Result")


def _is_narrow_matrix(value: Any) -> bool:
    narrow = value.get_element_type().get_type_name() in NARROW
    return narrow and _kind(value) == "Constant" and len(value.get_partial_shape()) == 2


def _kind(value: Any) -> str:
    kind: str = value.get_node().get_type_name()
    return kind


def _readers(node: Any) -> set[str]:
    return {reader.get_node().get_type_name() for reader in node.output(0).get_target_inputs()}


@contextmanager
def letting_go(model: Any, *, at_once: bool = True) -> Iterator[None]:
    """Pages of the weights' files that are read meanwhile do not stay resident, on Linux.

    To be held while the engine packs them: each page is read once, and the packed form is what it computes with.
    The files stay mapped; whoever reads them again finds them. `model` is an openvino.Model read from files. Where
    they need not go `at_once` they do so at the end, and none is fetched twice.
    """
    mapped = _mapped(model) if sys.platform == "linux" else []
    if not mapped:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_drop_until, args=(done, mapped), daemon=True)
    if at_once:
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if at_once:
            watcher.join()
        _drop(mapped)


def _mapped(model: Any) -> list[tuple[int, int]]:
    """First address and size of each shared file mapping that a constant of the model lies in.

    The model keeps them mapped as long as it is there, so nothing else can come to lie at these addresses.
    """
    constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    places = {node.get_tensor_view().data.ctypes.data for node in constants}
    mappings = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            bounds, rights, _, _, inode, *_ = line.split()
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            if rights[-1] == "s" and inode != "0" and any(first <= place < end for place in places):
                mappings.append((first, end - first))
    return mappings


def _drop_until(done: threading.Event, mapped: list[tuple[int, int]]) -> None:
    while not done.wait(_SECONDS):
        _drop(mapped)


def _drop(mapped: list[tuple[int, int]]) -> None:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for first, length in mapped:
        advise(first, length, _MADV_DONTNEED)  # where it is refused, pages stay: nothing but memory is lost
