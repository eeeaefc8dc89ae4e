"""K and V of a stage whose tokens see each other both ways, which OpenVINO's paged attention does not do.

The stage's graph runs as it is written: K and V of the filled slots go in, those of the new tokens come out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.openvino.cache import OpenvinoCacheContext
from vtx.runtime.backends.openvino.graph import OpenvinoGraph
from vtx.runtime.backends.slots import SlotCounter, seen_slots
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates


class OpenvinoGrowingCache(SlotCounter):
    """`StageCache` over host arrays, `kv` [cached layers, 2, kv_heads, capacity, head_dim]; without attention."""

    def __init__(self, context: OpenvinoCacheContext, graph: OpenvinoGraph, spec: StageSpec, capacity: int) -> None:
        super().__init__(capacity)
        self._context, self._graph, self._spec, model = context, graph, spec, context.model
        self.kv = np.zeros((len(spec.cached), 2, model.kv_heads, capacity, model.head_dim), context.key)

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        assert not query, "methods that go by attention are refused at export"
        before, kinds = self.length, (names.past_key, names.past_value)
        inputs: dict[str, NDArray[Any]] = {
            names.HIDDEN: tokens.hidden, names.POSITIONS: positions[None],
            names.SEEN_SLOTS: seen_slots(tokens, before)[None], **self._context.rope,
            **{names.token_input(name): tokens.inputs[name] for name in self._spec.inputs},
        }  # fmt: skip
        for layer, pair in zip(self._spec.cached, self.kv, strict=True):
            inputs |= {name(layer): part[None, :, :before] for name, part in zip(kinds, pair, strict=True)}
        outputs = self._graph.run(inputs)
        for layer, (keys, values) in zip(self._spec.cached, self.kv, strict=True):
            for part, name in ((keys, names.present_key), (values, names.present_value)):
                grown = outputs[name(layer)][0]
                part[:, before : grown.shape[1]] = grown[:, before:]
        return outputs[names.HIDDEN_OUT]

    def attention(self, *, last_only: bool = False) -> Scores:
        raise AssertionError("methods that go by attention are refused at export")

    def keys(self) -> NDArray[np.float32]:
        return self.kv[-1, 0, :, : self.length].astype(np.float32)

    def read(self, slots: Ids) -> NDArray[Any]:
        return self.kv[..., slots, :]

    def write(self, slots: Ids, kv: NDArray[Any], *, length: int) -> None:
        self.kv[..., slots, :] = kv
        self.fill(length)
