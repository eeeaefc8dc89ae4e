"""ONNX models byte by byte: the wire format of its protocol buffers, without an exporting library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

OPSETS, IR_VERSION = {"": 21, "com.microsoft": 1}, 10
FLOAT, UINT8, INT8, INT4 = 1, 2, 3, 22  # TensorProto.DataType
INT = 2  # AttributeProto.AttributeType
Fields = Sequence[tuple[int, int | bytes]]


@dataclass(frozen=True, slots=True)
class Node:
    """One operator with one output; attributes are whole numbers."""

    operator: str
    inputs: Sequence[str]
    output: str
    attributes: Mapping[str, int] = field(default_factory=dict)
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Constant:
    """A weight: one of the types above, `values` in the order of memory (INT4: two to a byte)."""

    type: int
    shape: Sequence[int]
    values: NDArray[np.generic]


def model(nodes: Sequence[Node], constants: Mapping[str, Constant], x: Sequence[int], y: Sequence[int]) -> bytes:
    """An ONNX model from the float32 input `x` of that shape to the float32 output `y`."""
    graph = [
        *((1, _node(node)) for node in nodes), (2, b"graph"),
        *((5, _constant(name, constant)) for name, constant in constants.items()),
        (11, _value("x", x)), (12, _value("y", y)),
    ]  # fmt: skip
    opsets = [(8, _message([(1, domain.encode()), (2, version)])) for domain, version in OPSETS.items()]
    return _message([(1, IR_VERSION), (7, _message(graph)), *opsets])


def _node(node: Node) -> bytes:
    attributes = [(5, _message([(1, name.encode()), (3, value), (20, INT)])) for name, value in node.attributes.items()]
    inputs = [(1, name.encode()) for name in node.inputs]
    words = [(2, node.output.encode()), (4, node.operator.encode())]
    return _message([*inputs, *words, *attributes, (7, node.domain.encode())])


def _constant(name: str, constant: Constant) -> bytes:
    sizes = [(1, size) for size in constant.shape]
    return _message([*sizes, (2, constant.type), (8, name.encode()), (9, constant.values.tobytes())])


def _value(name: str, shape: Sequence[int]) -> bytes:
    """A ValueInfoProto of float32."""
    dims = _message([(1, _message([(1, size)])) for size in shape])
    return _message([(1, name.encode()), (2, _message([(1, _message([(1, FLOAT), (2, dims)]))]))])


def _message(fields: Fields) -> bytes:
    """A protocol-buffer message of (number, value) fields: whole numbers as varints, the rest by length."""
    parts = list[bytes]()
    for number, value in fields:
        if isinstance(value, int):
            parts += [bytes(_varint(number << 3)), bytes(_varint(value))]
        else:
            parts += [bytes(_varint(number << 3 | 2)), bytes(_varint(len(value))), value]
    return b"".join(parts)


def _varint(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
