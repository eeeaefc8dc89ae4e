"""K and V of stages that OpenVINO's paged attention does not serve: seen both ways, or held by an earlier stage.

The stage's graph runs as it is written: K and V of the filled slots go in, those of the new tokens come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.openvino.cache import OpenvinoCacheContext, OpenvinoStageCache
from vtx.runtime.backends.openvino.graph import OpenvinoGraph
from vtx.runtime.backends.slots import ReadingCounter, SlotCounter, seen_slots
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates


class OpenvinoGrowingCache(SlotCounter):
    """`StageCache` over host arrays, `kv` [cached layers, 2, kv_heads, capacity, head_dim]; without attention."""

    def __init__(self, context: OpenvinoCacheContext, graph: OpenvinoGraph, spec: StageSpec, capacity: int) -> None:
        super().__init__(capacity)
        if spec.query:
            raise BundleError(
                f"{graph.name} gives its attention, and its tokens see each other both ways; export again"
            )
        self._context = context
        self._graph = graph
        self._spec = spec
        model = context.model
        self.kv = np.zeros((len(spec.cached), 2, model.kv_heads, capacity, model.head_dim), context.key)

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        before = self.length
        kinds = (names.past_key, names.past_value)
        inputs: dict[str, NDArray[Any]] = {
            names.HIDDEN: tokens.hidden,
            names.POSITIONS: positions[None],
            names.SEEN_SLOTS: seen_slots(tokens, before)[None],
            **self._context.rope,
            **{names.token_input(name): tokens.inputs[name] for name in self._spec.inputs},
        }
        for layer, pair in zip(self._spec.cached, self.kv, strict=True):
            inputs |= {name(layer): part[None, :, :before] for name, part in zip(kinds, pair, strict=True)}
        outputs = self._graph.run(inputs)
        for layer, (keys, values) in zip(self._spec.cached, self.kv, strict=True):
            for part, name in ((keys, names.present_key), (values, names.present_value)):
                grown = outputs[name(layer)][0]
                part[:, before : grown.shape[1]] = grown[:, before:]
        return outputs[names.HIDDEN_OUT]

    def attention(self, *, last_only: bool = False) -> Scores:
        raise AssertionError("stages that give their attention are refused")

    def keys(self) -> NDArray[np.float32]:
        return self.kv[-1, 0, :, : self.length].astype(np.float32)

    def _read(self, slots: Ids) -> NDArray[Any]:
        return self.kv[..., slots, :]

    def _write(self, slots: Ids, kv: NDArray[Any], length: int) -> None:
        self.kv[..., slots, :] = kv


class OpenvinoReadingCache(ReadingCounter):
    """The cache of a stage whose layers keep nothing: they read K and V of `sources`, caches by layer.

    K and V are copied out of their blocks for each run.
    """

    def __init__(
        self,
        context: OpenvinoCacheContext,
        graph: OpenvinoGraph,
        spec: StageSpec,
        sources: Mapping[int, OpenvinoStageCache],
    ) -> None:
        super().__init__()
        self._context = context
        self._graph = graph
        self._spec = spec
        self._sources = sources

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        context = self._context
        inputs: dict[str, NDArray[Any]] = {
            names.HIDDEN: tokens.hidden,
            names.POSITIONS: positions[None],
            **context.rope,
            **{names.token_input(name): tokens.inputs[name] for name in self._spec.inputs},
        }
        for layer, cache in sorted(self._sources.items(), key=lambda source: context.model.slides(source[0])):
            at = cache.spec.cached.index(layer)
            for part, name in enumerate((names.past_key, names.past_value)):
                inputs[name(layer)] = cache.numbers(at, part)[None].astype(context.key, copy=False)
            inputs[names.FIRST_SLOT] = cache.first_slots(positions, cache.length)[None]  # last: of one that slides
        return self._graph.run(inputs)[names.HIDDEN_OUT]
