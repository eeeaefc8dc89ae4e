"""`plain` graphs in the form that OpenVINO's own kernels take: attention as one operator, K and V as its state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from vtx.runtime import names
from vtx.runtime.errors import BundleError

SEQUENCE = "sequence"  # which sequence a state goes on from: there is one, but the attention kernel wants to be told


def fuse_attention(model: Any) -> None:
    """Replace each softmax(q k^T * scale + mask) v by one operator.

    OpenVINO's own pass misses these products, whose numbers of rows and slots it cannot relate to each other. `model`
    is an openvino.Model and is changed.

    Raises:
        BundleError: attention is written in another way than vtx writes it.

    """
    from openvino import opset13 as ops

    for softmax in [node for node in model.get_ordered_ops() if node.get_type_name() == "Softmax"]:
        scores, mask = softmax.input_value(0), None
        if _kind(scores) == "Add":
            scores, mask = _inputs(scores, "Add")
        products, scale = _inputs(scores, "Multiply")
        query, turned = _inputs(products, "MatMul")
        key, _ = _inputs(turned, "Transpose")
        (product,) = _readers(softmax.output(0))
        _, value = _inputs(product.output(0), "MatMul")
        if mask is None:
            mask = ops.constant(np.zeros((1, 1), np.float32))
        fused = ops.scaled_dot_product_attention(
            query, key, value, ops.unsqueeze(mask, np.array([0, 1])), scale, causal=False
        )
        _lead(product.output(0), fused.output(0))


def keep_state(model: Any, layers: Iterable[int]) -> None:
    """Turn the caches of `layers`, which come and go as tensors, into state that stays in an infer request.

    Each becomes a variable named as its input was, [1, kv_heads, slots, head_dim] float32; in which type the engine
    holds it, its settings say. `model` is an openvino.Model and is changed.
    """
    from openvino import opset13 as ops

    sequence = ops.parameter([1], np.int32, name=SEQUENCE)
    sequence.output(0).tensor.set_names({SEQUENCE})
    model.add_parameters([sequence])
    for layer in layers:
        _keep(model, names.past_key(layer), names.present_key(layer), sequence)
        _keep(model, names.past_value(layer), names.present_value(layer), sequence)
    model.validate_nodes_and_infer_types()


def _keep(model: Any, past: str, present: str, sequence: Any) -> None:
    from openvino import opset13 as ops
    from openvino.op import assign, read_value

    given, result = model.input(past).get_node(), model.output(present).get_node()
    variable = _variable(past, given.get_partial_shape())
    empty = [0 if size.is_dynamic else size.get_length() for size in given.get_partial_shape()]
    state = read_value(ops.constant(np.zeros(empty, np.float32)), variable)
    before = ops.gather(state, sequence, ops.constant(np.array(0)))
    for reader in given.output(0).get_target_inputs():
        node = reader.get_node()
        if node.get_type_name() == "Convert":  # from the type that the bundle gives K and V
            _lead(node.output(0), before.output(0))
        else:  # whoever asks for the number of slots must not stand between state and attention
            reader.replace_source_output((state if node.get_type_name() == "ShapeOf" else before).output(0))
    after = result.input_value(0)
    if _kind(after) == "Convert":  # back to it
        after = after.get_node().input_value(0)
    model.remove_result(result)
    model.remove_parameter(given)
    model.add_variables([variable])
    model.add_sinks([assign(after.get_node(), variable)])


def _variable(name: str, shape: Any) -> Any:
    from openvino import Type
    from openvino.op.util import Variable, VariableInfo

    info = VariableInfo()
    info.variable_id, info.data_shape, info.data_type = name, shape, Type.f32
    return Variable(info)


def _lead(old: Any, new: Any) -> None:
    """Let everything that reads `old` read `new`."""
    for reader in old.get_target_inputs():
        reader.replace_source_output(new)


def _readers(value: Any) -> list[Any]:
    return [reader.get_node() for reader in value.get_target_inputs()]


def _kind(value: Any) -> str:
    kind: str = value.get_node().get_type_name()
    return kind


def _inputs(value: Any, kind: str) -> tuple[Any, Any]:
    if _kind(value) != kind:
        raise BundleError(f"a {_kind(value)} stands where attention has its {kind}; export the bundle again")
    return value.get_node().input_value(0), value.get_node().input_value(1)
