"""Activation functions by the names that Hugging Face's configurations use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from vtx.exporter.graphs.builder import MICROSOFT, Builder
from vtx.runtime.errors import UnsupportedModelError


def _scalar(b: Builder, value: float) -> ir.Value:
    return b.constant(np.array(value, np.float32))


def _swish(b: Builder, x: ir.Value, rate: float) -> ir.Value:
    """X * sigmoid(rate * x), one fused kernel in onnxruntime."""
    return b.op("QuickGelu", x, domain=MICROSOFT, alpha=rate)


def _relu2(b: Builder, x: ir.Value) -> ir.Value:
    y = b.op("Relu", x)
    return b.op("Mul", y, y)


ACTIVATIONS: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    "gelu": lambda b, x: b.op("Gelu", x),
    "gelu_python": lambda b, x: b.op("Gelu", x),
    "gelu_new": lambda b, x: b.op("Gelu", x, approximate="tanh"),
    "gelu_fast": lambda b, x: b.op("Gelu", x, approximate="tanh"),
    "gelu_accurate": lambda b, x: b.op("Gelu", x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda b, x: b.op("Gelu", x, approximate="tanh"),
    "gelu_python_tanh": lambda b, x: b.op("Gelu", x, approximate="tanh"),
    "gelu_10": lambda b, x: b.op("Clip", b.op("Gelu", x), _scalar(b, -10), _scalar(b, 10)),
    "quick_gelu": lambda b, x: _swish(b, x, 1.702),
    "silu": lambda b, x: _swish(b, x, 1.0),
    "swish": lambda b, x: _swish(b, x, 1.0),
    "relu": lambda b, x: b.op("Relu", x),
    "relu2": _relu2,
    "relu6": lambda b, x: b.op("Clip", x, _scalar(b, 0), _scalar(b, 6)),
    "leaky_relu": lambda b, x: b.op("LeakyRelu", x, alpha=0.01),
    "hardswish": lambda b, x: b.op("HardSwish", x),
    "mish": lambda b, x: b.op("Mish", x),
    "sigmoid": lambda b, x: b.op("Sigmoid", x),
    "tanh": lambda b, x: b.op("Tanh", x),
    "linear": lambda b, x: x,
}


def check_activation(name: str) -> None:
    """Raise UnsupportedModelError when `name` is not among `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported; vtx knows {', '.join(sorted(ACTIVATIONS))}")


def activate(b: Builder, x: ir.Value, name: str) -> ir.Value:
    return ACTIVATIONS[name](b, x)
