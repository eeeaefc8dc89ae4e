"""Small steps by which graphs are rewritten for OpenVINO. A value is an openvino.Output, one output of a node."""

from __future__ import annotations

from typing import Any


def kind_of(value: Any) -> str:
    kind: str = value.get_node().get_type_name()
    return kind


def readers_of(value: Any) -> list[Any]:
    return [reader.get_node() for reader in value.get_target_inputs()]


def replace(old: Any, new: Any) -> None:
    for reader in old.get_target_inputs():
        reader.replace_source_output(new)


def product_like(product: Any, left: Any, right: Any) -> Any:
    from openvino import opset13 as ops

    attributes = product.get_attributes()
    return ops.matmul(left, right, attributes["transpose_a"], attributes["transpose_b"])


def replace_node(old: Any, new: Any) -> None:
    new.output(0).get_tensor().set_names(old.output(0).get_names())
    replace(old.output(0), new.output(0))


def add_parameter(model: Any, name: str, sizes: list[int], kind: str) -> Any:
    from openvino import PartialShape, Type
    from openvino import opset13 as ops

    parameter = ops.parameter(PartialShape(sizes), getattr(Type, kind), name=name)
    parameter.output(0).tensor.set_names({name})
    model.add_parameters([parameter])
    return parameter
