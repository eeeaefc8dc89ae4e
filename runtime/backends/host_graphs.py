"""The base of onnxruntime's and OpenVINO's backends: graphs that run on host arrays, and batches of their caches."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import StageCache
from vtx.runtime.backends.failures import cache_failure
from vtx.runtime.backends.slots import CACHES_OF_ONE, SlotCounter
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.tensors import read_kv_scales, read_rope
from vtx.runtime.precision import KV_DTYPES
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, TokenStates


class HostGraph(Protocol):
    name: str

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]: ...
    def close(self) -> None: ...


class StageBatch(Protocol):
    def append_each(
        self, caches: Sequence[Any], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates: ...


class HostBackend(ABC):
    """A `Backend` but for `stage`. Towers that a subclass does not load are loaded when they first run.

    Subclasses set `_embed`, `_head`, `_score` and `_gates`.
    """

    device: str
    dialect: str
    runs_of_each = False
    _embed: HostGraph
    _head: HostGraph
    _score: HostGraph | None
    _gates: Mapping[int, HostGraph]

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._manifest = bundle.manifest
        self._graphs = self._manifest.dialects[self.dialect]
        self._towers: dict[str, HostGraph] = {}
        self._tower_lock = threading.Lock()
        self._batches: Sequence[StageBatch] = []

    @staticmethod
    def refusal(kv_dtype: str, *, jetson: bool) -> str | None:
        return None

    @abstractmethod
    def _load_tower(self, name: str, promised: graphs.GraphIO, image: ImageSettings | None) -> HostGraph:
        """Load a graph of images, or one of other tokens, whose `image` is None."""

    @abstractmethod
    def _new_batches(self, lanes: int, capacity: int) -> Sequence[StageBatch]:
        """For each stage a pool of `lanes` caches of `capacity` slots; MemoryError if there is no room."""

    def _tower(self, name: str, promised: graphs.GraphIO, image: ImageSettings | None) -> HostGraph:
        with self._tower_lock:
            if name not in self._towers:
                self._towers[name] = self._load_tower(name, promised, image)
            return self._towers[name]

    def embed(self, ids: Ids) -> TokenStates:
        outputs = self._embed.run({names.IDS: contract.embeddable(self._manifest, ids)})
        return contract.embedded(self._embed.name, outputs, len(ids))

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        m = self._manifest
        name = self._graphs.vision
        graph = self._towers.get(name) or self._tower(name, graphs.vision(m, self.dialect), m.image)
        outputs = graph.run({names.PIXELS: pixels, **contract.vision_extras(m, self.dialect, extras)})
        return ImageTokens.of(outputs, m.model.tower)

    def video(self, pixels: NDArray[np.float32]) -> ImageTokens:
        name = self._graphs.video
        declared = self._manifest.video
        if name is None or declared is None:
            return self.vision(pixels)
        graph = self._tower(name, graphs.video(self._manifest), declared.image)
        return ImageTokens.of(graph.run({names.PIXELS: pixels}), self._manifest.model.tower)

    def expert(
        self, prompt: Sequence[Any], state: NDArray[np.float32], positions: Ids
    ) -> Callable[[NDArray[np.float32], float], NDArray[np.float32]]:
        m = self._manifest
        scales = read_kv_scales(self._bundle) if KV_DTYPES[names.kv_type(self.dialect, m.kv_dtype)].scaled else {}
        inputs: dict[str, NDArray[Any]] = dict(read_rope(self._bundle))
        inputs[names.POSITIONS] = positions
        if m.action is not None and m.action.state_in == "expert":
            inputs[names.ROBOT_STATE] = state[None]
        for stage, kv in zip(m.stages, prompt, strict=True):
            for layer, keys_and_values in zip(stage.cached, kv, strict=True):
                pair = keys_and_values.reshape(2, m.model.kv_heads, -1, m.model.head_dim).astype(np.float32)
                kinds = (names.past_key, names.key_scale), (names.past_value, names.value_scale)
                for part, (name, scale) in zip(pair, kinds, strict=True):
                    inputs[name(layer)] = part * scales[scale(layer)][0] if scales else part

        def step(actions: NDArray[np.float32], time: float) -> NDArray[np.float32]:
            now = {names.ACTIONS: actions, names.TIME: np.full((1, 1), time, np.float32)}
            return self._head.run(inputs | now)[names.CHANGE]

        return step

    def head(self, hidden: HiddenStates) -> NDArray[np.float32]:
        return contract.of_each(self._head.name, self._head.run({names.HIDDEN: hidden})[names.LOGITS], len(hidden))

    def gate(self, k: int, hidden: HiddenStates) -> NDArray[np.float32]:
        return self._gates[k].run({names.HIDDEN: hidden})[names.ODDS]

    def text_tower(self, ids: Ids) -> NDArray[np.float32]:
        assert self._graphs.text_tower is not None, "the manifest declares no text tower"
        graph = self._tower(self._graphs.text_tower, graphs.text_tower(self._manifest), None)
        return contract.of_each(graph.name, graph.run({names.IDS: ids})[names.TEXT_EMBEDDING], 1)

    def project(self, states: HiddenStates) -> HiddenStates:
        assert self._graphs.projector is not None, "the bundle has no graph of the projector"
        graph = self._tower(self._graphs.projector, graphs.projector(self._manifest), None)
        return contract.of_each(graph.name, graph.run({names.TOWER_STATES: states})[names.HIDDEN], len(states))

    def share_caches(self, conversations: int) -> None:
        slots = self._manifest.max_context
        lanes = CACHES_OF_ONE * conversations
        try:
            self._batches = self._new_batches(lanes, slots)
        except MemoryError as e:
            raise cache_failure(lanes * slots) from e

    def reaches(self, caches: Sequence[StageCache]) -> bool:
        return all(isinstance(cache, SlotCounter) and cache.lane is not None for cache in caches)

    def append_each(
        self, index: int, caches: Sequence[StageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        return self._batches[index].append_each(caches, tokens, positions, counts)

    def close(self) -> None:
        self._batches = []
        with self._tower_lock:
            loaded = [self._embed, self._head, *self._gates.values(), *self._towers.values()]
        for graph in loaded if self._score is None else [*loaded, self._score]:
            graph.close()
