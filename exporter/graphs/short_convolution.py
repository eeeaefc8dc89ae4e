"""Decoder layers with a gated short convolution in place of attention, and the state that they keep: LFM2.

With B, C and x of a token's three parts, it gives out C * conv(B * x): each channel of B * x is convolved over the last
`conv_taps` tokens. The state is B * x of the last `conv_taps - 1` tokens, zeros before the first. No position enters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, Builder, Shapes, linear_tensors
from vtx.runtime.bundle.spec import names

END = 1 << 30  # of any axis


def convolution_tensors(c: TextConfig, name: str) -> Shapes:
    yield from linear_tensors(f"{name}.in_proj", 3 * c.hidden, c.hidden, bias=c.conv_bias)
    yield f"{name}.conv.weight", (c.hidden, 1, c.conv_taps)
    if c.conv_bias:
        yield f"{name}.conv.bias", (c.hidden,)
    yield from linear_tensors(f"{name}.out_proj", c.hidden, c.hidden, bias=c.conv_bias)


class Convolutions:
    """The convolutions of a stage's `layers`: one input and one output hold the states of all of them.

    The state's axis of conversations says how the tokens of a run divide among them.
    """

    def __init__(self, b: Builder, c: TextConfig, layers: Sequence[int]) -> None:
        self._b, self._c, self._layers, columns = b, c, layers, c.conv_taps - 1
        self._past = b.input(names.STATE, FLOAT, [len(layers), "conversations", columns, c.hidden])
        ends = b.input(names.STATE_ENDS, ir.DataType.INT64, ["ends"])
        each = b.op("Add", b.op("Unsqueeze", ends, b.constant([1])), b.constant(list(range(columns))))
        self._columns = b.reshape(each, -1)  # of the past and the run together, the columns that are given out
        conversations = b.op("Shape", self._past, start=1, end=2)
        self._apart = b.op("Concat", conversations, b.constant([-1, c.hidden]), axis=0)
        self._states: list[ir.Value] = []

    def mix(self, x: ir.Value, name: str, layer: int) -> ir.Value:
        """The layer's convolution of hidden states [tokens, hidden]."""
        b, c, taps, axis = self._b, self._c, self._c.conv_taps, self._b.constant([1])
        together = b.linear(x, f"{name}.in_proj", bias=c.conv_bias)
        first, gate, last = (
            b.op("Slice", together, b.constant([start]), b.constant([start + c.hidden]), axis)
            for start in range(0, 3 * c.hidden, c.hidden)
        )
        new = b.op("Reshape", b.op("Mul", first, last), self._apart)
        index = b.constant(np.array(self._layers.index(layer)))
        past = b.from_float32(b.op("Gather", self._past, index, axis=0))
        columns = b.op("Concat", past, new, axis=1)
        kernel, mixed = b.weight(f"{name}.conv.weight"), list[ir.Value]()
        for tap in range(taps):
            seen = b.op("Slice", columns, b.constant([tap]), b.constant([tap + 1 - taps or END]), axis)
            weight = b.reshape(b.op("Gather", kernel, b.constant(np.array(tap)), axis=2), c.hidden)
            mixed.append(b.op("Mul", seen, weight))
        y = mixed[0]
        for part in mixed[1:]:
            y = b.op("Add", y, part)
        if c.conv_bias:
            y = b.op("Add", y, b.weight(f"{name}.conv.bias"))
        kept = b.to_float32(b.op("Gather", columns, self._columns, axis=1))
        self._states.append(b.op("Unsqueeze", kept, b.constant([0])))
        return b.linear(b.op("Mul", gate, b.reshape(y, -1, c.hidden)), f"{name}.out_proj", bias=c.conv_bias)

    def finish(self) -> None:
        """Declare the states as an output."""
        states = self._b.op("Concat", *self._states, axis=0)
        shape: list[int | str] = [len(self._layers), "conversations", "columns", self._c.hidden]
        self._b.output(states, names.STATE_OUT, FLOAT, shape)
