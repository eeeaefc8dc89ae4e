"""The states of a stage's layers with a convolution: one input and one output hold those of all of them.

The state's axis of conversations says how the tokens of a run divide among them. A state begins with what the layer
convolves of the last `conv_taps - 1` tokens, zeros before the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, INT64, Builder
from vtx.runtime.bundle.spec import graphs, names

END = 1 << 30  # of any axis


class States:
    """The states of `layers`, each to be read by `read` and its successors given to `keep` once."""

    def __init__(self, b: Builder, c: TextConfig, layers: Sequence[int]) -> None:
        self._b = b
        self._c = c
        self._layers = layers
        columns = c.conv_taps - 1
        self._past = b.input(names.STATE, FLOAT, [len(layers), graphs.CONVERSATIONS, c.state_numbers])
        self.ends = b.input(names.STATE_ENDS, INT64, [graphs.ENDS])
        numbers = b.op("Add", b.unsqueeze(self.ends, 1), b.constant(list(range(columns))))
        self._columns = b.reshape(numbers, -1)  # of the past and the run together, the columns that are given out
        self.conversations = b.size(self._past, 1)
        self._states: list[ir.Value] = []

    def apart(self, x: ir.Value, *sizes: int) -> ir.Value:
        """[tokens, ...] to [conversations, tokens of each, *sizes]."""
        b = self._b
        return b.op("Reshape", x, b.op("Concat", self.conversations, b.constant([-1, *sizes]), axis=0))

    def read(self, layer: int) -> tuple[ir.Value, ir.Value | None]:
        """A layer's last columns [conversations, taps - 1, channels], and the rest of its state, [conversations, n]."""
        b = self._b
        c = self._c
        number = self._layers.index(layer)
        columns = (c.conv_taps - 1) * c.convolved
        parts = list[ir.Value]()
        for first, end in ((0, columns), (columns, c.state_numbers)):
            if first < end:  # of this layer and these numbers at once: the state of a delta rule is large
                begins = b.constant([number, first])
                ends = b.constant([number + 1, end])
                parts.append(b.op("Slice", self._past, begins, ends, b.constant([0, 2])))
        past = b.from_float32(b.reshape(parts[0], -1, c.conv_taps - 1, c.convolved))
        return past, parts[1] if len(parts) > 1 else None

    def convolve(self, new: ir.Value, past: ir.Value, name: str, *, bias: bool = False) -> tuple[ir.Value, ir.Value]:
        """The convolution of each channel of `new` [conversations, each, channels] by the weight `name`.

        Also the columns [conversations, ends, columns * channels] of the states that are given out.
        """
        b = self._b
        c = self._c
        axis = self._b.constant([1])
        taps = self._c.conv_taps
        columns = b.op("Concat", past, new, axis=1)
        kernel = b.weight(f"{name}.weight")
        mixed = list[ir.Value]()
        for tap in range(taps):
            column = b.op("Slice", columns, b.constant([tap]), b.constant([tap + 1 - taps or END]), axis)
            weight = b.reshape(b.op("Gather", kernel, b.constant(tap), axis=2), c.convolved)
            mixed.append(b.op("Mul", column, weight))
        y = mixed[0]
        for part in mixed[1:]:
            y = b.op("Add", y, part)
        if bias:
            y = b.op("Add", y, b.weight(f"{name}.bias"))
        last = b.to_float32(b.op("Gather", columns, self._columns, axis=1))
        return y, b.reshape(last, 0, -1, (taps - 1) * c.convolved)

    def keep(self, state: ir.Value) -> None:
        """Give out the next layer's states [conversations, ends, numbers]."""
        self._states.append(self._b.unsqueeze(state, 0))

    def finish(self) -> None:
        """Declare the states as an output."""
        states = self._b.op("Concat", *self._states, axis=0)
        shape: list[int | str] = [len(self._layers), graphs.CONVERSATIONS, graphs.ENDS, self._c.state_numbers]
        self._b.output(states, names.STATE_OUT, FLOAT, shape)
