"""A stage's last layer behind its attention, for the rows alone whose hidden states are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from vtx.runtime.backends.openvino.paged import add_parameter
from vtx.runtime.errors import BundleError

ROWS = "rows"  # which of the hidden states go on, [m] int32
_ON_THE_WAY = ("Reshape", "Transpose", "Squeeze", "Convert")
_BEHIND_A_PRODUCT = ("Convert", "Multiply", "Add")  # its factor, and its bias


def choose_rows(model: Any) -> None:
    """Add the input `ROWS`: the last layer's output projection and MLP run for these rows, its K and V are of all.

    `model` is an openvino.Model whose caches are in pages already, and is changed.

    Raises:
        BundleError: a layer is written in another way than vtx writes it.

    """
    chosen = add_parameter(model, ROWS, [-1], "i32")
    attention = [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"][-1]
    product = attention.output(0)
    while (reader := _only_reader(product)).get_type_name() != "MatMul":
        if reader.get_type_name() not in _ON_THE_WAY:
            raise _unknown(reader)
        product = reader.output(0)
    _gather(reader.input(0), chosen)
    total = reader.output(0)
    while (reader := _only_reader(total)).get_type_name() in _BEHIND_A_PRODUCT:
        beside = [x for x in reader.inputs() if x.get_source_output() != total]
        if beside and len(beside[0].get_partial_shape()) == 2:  # the residual sum; a bias has one axis
            _gather(beside[0], chosen)
            model.validate_nodes_and_infer_types()
            return
        total = reader.output(0)
    raise _unknown(reader)


def _gather(reader: Any, rows: Any) -> None:
    """Let an input [tokens, width] read `rows` of what it read."""
    from openvino import opset13 as ops

    first_axis = ops.constant(np.array(0, np.int32))
    reader.replace_source_output(ops.gather(reader.get_source_output(), rows, first_axis).output(0))


def _only_reader(value: Any) -> Any:
    readers = [reader.get_node() for reader in value.get_target_inputs()]
    if len(readers) != 1:
        raise BundleError(f"{len(readers)} operators read a layer's attention; export the bundle again")
    return readers[0]


def _unknown(node: Any) -> BundleError:
    return BundleError(f"a {node.get_type_name()} stands behind a layer's attention; export the bundle again")
