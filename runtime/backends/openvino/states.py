"""States on OpenVINO: parts of each layer's, in place of the one input and the one output that a stage has for all.

What a layer reads of its state then is an input, and what it makes an output, so that the engine neither cuts the one
apart nor joins the other, which it does by copying all states three times for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.openvino.nodes import add_parameter, kind_of, readers_of, replace
from vtx.runtime.bundle.spec import names

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StatePart:
    """The numbers from `first` to before `end` of the state of a stage's n-th layer that has one."""

    layer: int
    first: int
    end: int

    @property
    def given(self) -> str:
        return f"{names.STATE}.{self.layer}.{self.first}"

    @property
    def made(self) -> str:
        return f"{names.STATE_OUT}.{self.layer}.{self.first}"


@dataclass(frozen=True, slots=True)
class StateTensors:
    """The inputs and outputs of a stage's states, by name; without `parts` they are one of each, as the graph says."""

    parts: tuple[StatePart, ...] = ()

    @classmethod
    def of(cls, model: Any) -> StateTensors:
        """Have the states of a stage in parts. `model` is an openvino.Model and is changed.

        It stays as it is if states are cut apart and joined in another way than vtx now writes it, as in older bundles.
        """
        from openvino import opset13 as ops

        if not any(names.STATE in port.get_names() for port in model.inputs):
            return cls()
        state = model.input(names.STATE).get_node()
        result = model.output(names.STATE_OUT).get_node()
        readers = readers_of(state.output(0))
        cuts = {part: node for node in readers if (part := _part(node)) is not None}
        joined = _joined(result.input_value(0))
        parts = sorted(cuts, key=lambda part: (part.layer, part.first))
        sizes = [node for node in readers if node.get_type_name() == "ShapeOf"]
        if len(cuts) + len(sizes) < len(readers) or not parts or len(parts) != len(joined):
            return cls()
        for part, value in zip(parts, joined, strict=True):
            port = add_parameter(model, part.given, [1, -1, part.end - part.first], "f32")
            replace(cuts[part].output(0), port.output(0))
            output = ops.result(value)
            output.output(0).get_tensor().add_names({part.made})
            model.add_results([output])
        for node in sizes:  # that of conversations, which all parts have
            node.input(0).replace_source_output(model.input(parts[0].given))
        model.remove_result(result)
        model.remove_parameter(state)
        model.validate_nodes_and_infer_types()
        return cls(tuple(parts))

    def given(self, states: Floats) -> dict[str, Floats]:
        """The inputs of `states` [layers, conversations, numbers]: their own memory if it is of one conversation."""
        if not self.parts:
            return {names.STATE: states}
        cut = {part.given: states[part.layer : part.layer + 1, :, part.first : part.end] for part in self.parts}
        return {name: np.ascontiguousarray(array) for name, array in cut.items()}

    def room(self, states: Floats) -> dict[str, Floats]:
        """Memory for the outputs: of `states` [layers, 1, ends, numbers] itself for one end; else to be `put` there."""
        if not self.parts:
            return {names.STATE_OUT: states}
        cut = {part.made: states[part.layer, :, :, part.first : part.end] for part in self.parts}
        return cut if states.shape[2] == 1 else {name: np.empty(array.shape, np.float32) for name, array in cut.items()}

    def put(self, states: Floats, made: Callable[[str], Floats]) -> Floats:
        """Have the outputs `made`, by name, in `states` [layers, conversations, ends, numbers]. Returns it."""
        for part in self.parts:
            states[part.layer, :, :, part.first : part.end] = made(part.made)
        return states


def _part(node: Any) -> StatePart | None:
    """The part of the states that a node reads, None unless it is of one layer. Graphs leave out steps, which are 1."""
    if node.get_type_name() != "Slice" or any(kind_of(node.input_value(n)) != "Constant" for n in (1, 2, 4)):
        return None
    first, end, axes = (node.input_value(n).get_node().data.tolist() for n in (1, 2, 4))
    if axes != [0, 2] or end[0] != first[0] + 1 or kind_of(node.input_value(3)) == "Constant":
        return None
    return StatePart(first[0], first[1], end[1])


def _joined(states: Any) -> Sequence[Any]:
    """The values that are joined along the last axis, and along the first one, in this order; none if they are not."""
    layers = [states]
    if kind_of(states) == "Concat":
        layers = states.get_node().input_values()
    sources = list[Any]()
    for layer in layers:
        if kind_of(layer) != "Unsqueeze":
            return []
        state = layer.get_node().input_value(0)
        sources += state.get_node().input_values() if kind_of(state) == "Concat" else [state]
    return sources
