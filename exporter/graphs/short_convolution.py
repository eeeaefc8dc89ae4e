"""Decoder layers with a gated short convolution in place of attention: LFM2.

With B, C and x of a token's three parts, it gives out C * conv(B * x): each channel of B * x is convolved over the last
`conv_taps` tokens. The state is B * x of the last `conv_taps - 1` tokens. No position enters.
"""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.states import States


def mix_by_convolution(b: Builder, c: TextConfig, states: States, x: ir.Value, name: str, layer: int) -> ir.Value:
    """The layer's convolution of hidden states [tokens, hidden]."""
    together = b.linear(x, f"{name}.in_proj", bias=c.conv_bias)
    first, gate, last = (b.slice(together, start, start + c.hidden, 1) for start in range(0, 3 * c.hidden, c.hidden))
    past, _ = states.read(layer)
    y, history = states.convolve(
        states.apart(b.op("Mul", first, last), c.hidden), past, f"{name}.conv", bias=c.conv_bias
    )
    states.keep(history)
    return b.linear(b.op("Mul", gate, b.reshape(y, -1, c.hidden)), f"{name}.out_proj", bias=c.conv_bias)
