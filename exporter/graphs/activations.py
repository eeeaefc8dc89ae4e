"""Activation functions by their names in Hugging Face's configurations."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from vtx.exporter.graphs.builder import Builder
from vtx.runtime.errors import UnsupportedModelError


def _gelu(b: Builder, x: ir.Value) -> ir.Value:
    return b.dialect.gelu(b, x, tanh=False)


def _clip(b: Builder, x: ir.Value, low: float, high: float) -> ir.Value:
    return b.op("Clip", x, b.scalar(low), b.scalar(high))


ACTIVATIONS: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    **dict.fromkeys(("gelu", "gelu_python"), _gelu),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        lambda b, x: b.dialect.gelu(b, x, tanh=True),
    ),
    "gelu_10": lambda b, x: _clip(b, _gelu(b, x), -10, 10),
    "quick_gelu": lambda b, x: b.dialect.swish(b, x, 1.702),
    "silu": lambda b, x: b.dialect.swish(b, x, 1.0),
    "swish": lambda b, x: b.dialect.swish(b, x, 1.0),
    "relu": lambda b, x: b.op("Relu", x),
    "relu2": lambda b, x: b.op("Mul", *[b.op("Relu", x)] * 2),
    "relu6": lambda b, x: _clip(b, x, 0, 6),
    "leaky_relu": lambda b, x: b.op("LeakyRelu", x, alpha=0.01),
    "hardswish": lambda b, x: b.op("HardSwish", x),
    "mish": lambda b, x: b.dialect.mish(b, x),
    "sigmoid": lambda b, x: b.op("Sigmoid", x),
    "tanh": lambda b, x: b.op("Tanh", x),
    "linear": lambda b, x: x,
}


def check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported; vtx knows {', '.join(sorted(ACTIVATIONS))}")


def activate(b: Builder, x: ir.Value, name: str) -> ir.Value:
    return ACTIVATIONS[name](b, x)


def gated_mlp(b: Builder, x: ir.Value, name: str, activation: str, *, bias: bool = False) -> ir.Value:
    """The matrices `name`.gate_proj, up_proj and down_proj, with an activation between them."""
    gate, up = b.linears(x, [f"{name}.gate_proj", f"{name}.up_proj"], bias=bias)
    return b.linear(b.op("Mul", activate(b, gate, activation), up), f"{name}.down_proj", bias=bias)
