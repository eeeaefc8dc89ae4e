"""K and V of a stage on onnxruntime: buffers allocated once, bound as input and output alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import zeros_in_small_pages
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.vision.tokens import Ids, Rows, Scores


@dataclass(frozen=True, slots=True)
class OrtCacheContext:
    """What the caches of a bundle share. `rope` and `kv_scales` are OrtValues; `memory` says where K and V lie."""

    ort: Any
    model: ModelSpec
    kv_dtype: str
    rope: Mapping[str, Any]
    kv_scales: Mapping[str, Any]
    score: OrtGraph | None
    memory: str = "cpu"

    def value(self, array: NDArray[Any]) -> Any:
        """An OrtValue over a host array's own memory, which the caller holds."""
        return self.ort.OrtValue.ortvalue_from_numpy(array)


class OrtStageCache(SlotCounter):
    """`StageCache` whose K/V buffers are allocated once and bound as input and output alike.

    `kv` is [layers, 2, 1, kv_heads, capacity, head_dim]; `buffers` are its parts with the names they are bound by.
    `query` [tokens, heads * head_dim] are those of the tokens last appended with it. One token, as in decoding, runs
    through `row_binding`, made once; nothing is allocated for it.
    """

    bound_once = True

    def __init__(self, context: OrtCacheContext, stage: OrtGraph, spec: StageSpec, capacity: int) -> None:
        super().__init__(capacity)
        self._context, self._stage = context, stage
        model, kv_type = context.model, np.dtype(context.kv_dtype)
        shape = (spec.layers, 2, 1, model.kv_heads, capacity, model.head_dim)
        self.kv: NDArray[Any]
        self.buffers: list[tuple[str, str, Any]] = []
        for layer, (key, value) in zip(range(spec.first, spec.last + 1), self._allocate(shape, kv_type), strict=True):
            self.buffers.append((names.past_key(layer), names.present_key(layer), key))
            self.buffers.append((names.past_value(layer), names.present_value(layer), value))
        self._key_scale = context.kv_scales.get(names.key_scale(spec.last))
        scales = {name(n) for n in range(spec.first, spec.last + 1) for name in (names.key_scale, names.value_scale)}
        self._scales = {name: scale for name, scale in context.kv_scales.items() if name in scales}  # none if not int8
        self.query = np.zeros((0, model.heads * model.head_dim), np.float32)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        self._row: Rows = np.zeros((1, model.hidden), np.float32)
        self._row_out: Rows = np.zeros((1, model.hidden), np.float32)
        self._row_position = np.zeros((1, 1), np.int64)
        self.row_binding = self._bind(self._row, self._row_position, self._row_out)

    def _allocate(self, shape: tuple[int, ...], kv_type: np.dtype[Any]) -> Iterator[tuple[Any, Any]]:
        """Key and value buffer of each layer, of `shape` [layers, 2, 1, kv_heads, capacity, head_dim] together."""
        self.kv = zeros_in_small_pages(shape, kv_type)
        for layer in self.kv:
            yield self._context.value(layer[0]), self._context.value(layer[1])

    def _run(self, rows: Rows, positions: Ids, *, query: bool) -> Rows:
        count = len(rows)
        self._last[0], self._total[0] = self.length + count - 1, self.length + count
        if count == 1 and self.bound_once and not query:
            self._row[:], self._row_position[:] = rows, positions
            self._stage.run_bound(self.row_binding)
            return self._row_out
        # Held until the run is over: older releases of onnxruntime, 1.28 too, do not keep an array that is bound.
        rows, positions, out = np.ascontiguousarray(rows), positions[None].copy(), np.empty_like(rows)
        binding = self._bind(rows, positions, out)
        if query:
            self.query = np.empty((count, self.query.shape[1]), np.float32)
            binding.bind_ortvalue_output(names.QUERY, self._context.value(self.query))
        self._stage.run_bound(binding)
        return out

    def attention(self, *, last_only: bool = False) -> Scores:
        score, value = self._context.score, self._context.value
        assert score is not None
        query = self.query[-1:] if last_only else self.query
        binding = score.binding()
        binding.bind_ortvalue_input(names.QUERY, value(query))
        binding.bind_ortvalue_input(names.KEY, self.buffers[-2][2])  # the last layer's
        binding.bind_ortvalue_input(names.TOTAL_SLOTS, value(self._total))
        if self._key_scale is not None:
            binding.bind_ortvalue_input(names.KEY_SCALE, self._key_scale)
        binding.bind_output(names.ATTENTION_SUM, "cpu")
        binding.bind_output(names.ATTENTION_MAX, "cpu")
        score.run_bound(binding)
        total, most = binding.copy_outputs_to_cpu()
        return total[: self.length], most[: self.length]

    def keys(self) -> NDArray[np.float32]:
        return self._scaled(self.kv[-1, 0, 0, :, : self.length])

    def _scaled(self, keys: NDArray[Any]) -> NDArray[np.float32]:
        """Keys [kv_heads, slots, head_dim] of the last layer as numbers."""
        wide = keys.astype(np.float32)
        return wide if self._key_scale is None else wide * self._key_scale.numpy()[0]

    def read(self, slots: Ids) -> NDArray[Any]:
        return np.take(self.kv, slots, axis=-2)

    def write(self, slots: Ids, kv: NDArray[Any], *, length: int) -> None:
        self.kv[..., slots, :] = kv
        self.length = length

    def _bind(self, rows: Rows, positions: NDArray[np.int64], out: Rows) -> Any:
        binding, value = self._stage.binding(), self._context.value
        binding.bind_ortvalue_input(names.HIDDEN, value(rows))
        binding.bind_ortvalue_input(names.POSITIONS, value(positions))
        binding.bind_ortvalue_input(names.LAST_SLOT, value(self._last))
        binding.bind_ortvalue_input(names.TOTAL_SLOTS, value(self._total))
        binding.bind_ortvalue_output(names.HIDDEN_OUT, value(out))
        for name, constant in (*self._context.rope.items(), *self._scales.items()):
            binding.bind_ortvalue_input(name, constant)
        for past, present, buffer in self.buffers:
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        return binding
