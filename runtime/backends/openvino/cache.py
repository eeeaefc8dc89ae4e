"""K and V of a stage on OpenVINO: blocks in arrays of ours, which the engine's paged attention reads and fills."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import zeros_in_small_pages
from vtx.runtime.backends.failures import run_failures
from vtx.runtime.backends.openvino.graph import ENGINE, OpenvinoGraph, StageGraph, run_request, run_row
from vtx.runtime.backends.openvino.paged import BEGINS, BLOCK, BLOCK_BEGINS, BLOCKS, FILLED, OUTPUTS, PAST, WINDOW
from vtx.runtime.backends.slots import LanePool, SlotCounter, StateHistory
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec, TokenInput
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.bundle.tensors import rope_at
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

# Element types of K and V: bfloat16 by its bits; in u8 a slot of a head is its scale, zero point, and numbers.
KV_ARRAYS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
FEW = 8  # tokens at most that run over the narrow weights if there is a form for many
ROW_SCALE_BYTES = 8  # both in float32, computed when the slot is written


@dataclass(frozen=True, slots=True)
class OpenvinoCacheContext:
    """Shared by the caches of a bundle. `kv` is the type of K and V, one of `KV_ARRAYS`; `key`: of the score graph.

    `most_rows`: the most hidden states of one run, None for any number.
    """

    openvino: Any
    model: ModelSpec
    kv: str
    rope: Mapping[str, NDArray[np.float32]]
    score: OpenvinoGraph | None
    key: np.dtype[Any]
    most_rows: int | None = None
    token_inputs: tuple[TokenInput, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one layer, K and V of all heads; the mean of the layers that keep them."""
        width = self.model.mean_head_dim + (ROW_SCALE_BYTES if self.kv == "u8" else 0)
        return round(2 * self.model.kv_heads * width * np.dtype(KV_ARRAYS[self.kv]).itemsize)

    def shape(self, blocks: int, layer: int) -> tuple[int, ...]:
        width = self.model.heads_of(layer) + (ROW_SCALE_BYTES if self.kv == "u8" else 0)
        return blocks, self.model.kv_heads, BLOCK, width

    def shared(self, array: NDArray[Any]) -> Any:
        return self.openvino.Tensor(array, shared_memory=True)

    def blocks(self, array: NDArray[Any]) -> Any:
        if self.kv == "bf16":
            return self.openvino.Tensor(array, array.shape, self.openvino.Type.bf16)
        return self.shared(array)


class OpenvinoStageCache(SlotCounter):
    """`StageCache` whose K and V are arrays of blocks, which an infer request over the stage's graph reads and fills.

    `kv` is [2, blocks, kv_heads, slots of a block, slot width] of each layer, in the `lane` of a pool if one is given
    that has room, else in memory of its own. One token, as in decoding, runs through tensors made once.
    """

    def __init__(
        self, context: OpenvinoCacheContext, stage: StageGraph, spec: StageSpec, capacity: int,
        pool: LanePool | None = None,
    ) -> None:  # fmt: skip
        sliding, states = context.model.sliding, StateHistory(spec, context.model) if spec.stateful else None
        super().__init__(capacity, None if sliding is None else sliding.window, states)
        self.selects_outputs = spec.last in spec.cached
        self._context, self._stage, self.spec, self._reads = context, stage, spec, spec.inputs
        self._request, many = stage.request(), stage.for_many
        self._for_many, self._ran = None if many is None else many.create_infer_request(), self._request
        model, blocks = context.model, -(-capacity // BLOCK)
        self.lane = pool.take() if pool is not None else None
        if pool is not None and self.lane is not None:
            self.kv = [layer[:, self.lane.number, :blocks] for layer in pool.kv]
            weakref.finalize(self, pool.give_back, self.lane).atexit = False
        else:
            kv_type = np.dtype(KV_ARRAYS[context.kv])
            self.kv = [zeros_in_small_pages((2, *context.shape(blocks, layer)), kv_type) for layer in spec.cached]
        for layer, (keys, values) in zip(spec.cached, self.kv, strict=True):
            self._set(names.past_key(layer), context.blocks(keys))
            self._set(names.past_value(layer), context.blocks(values))
        self._past, self._begins, self._filled = np.zeros(1, np.int32), np.zeros(2, np.int32), np.array(0, np.int32)
        self._block_begins, self._block_numbers = np.zeros(2, np.int32), np.arange(blocks, dtype=np.int32)
        bound_once = {PAST: self._past, BEGINS: self._begins, FILLED: self._filled, BLOCK_BEGINS: self._block_begins}
        self._window = np.array(0, np.int32)
        if sliding is not None:
            bound_once[WINDOW] = self._window
        for name, array in (*context.rope.items(), *bound_once.items()):
            self._set(name, context.shared(array))
        self._row_out, self._row_position = np.zeros((1, model.hidden), np.float32), np.zeros((1, 1), np.int64)
        widths = {each.name: each.width for each in context.token_inputs}
        row_inputs = {name: np.zeros((1, widths[name]), np.float32) for name in spec.inputs}
        self._row = TokenStates(np.zeros((1, model.hidden), np.float32), row_inputs)
        self._row_tensors = self._tensors(self._row, self._row_position, np.zeros(1, np.int32), self._row_out)
        self._query = np.zeros((0, 0), np.float32)
        self._bound: Any = None

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        """See `StageCache`. Many tokens go in runs of nearly the same size, which gives the same hidden states.

        So do tokens that see another number of slots in layers that slide.
        """
        if self.positions is not None and not query:
            self.place(positions)
            own = self.length + np.arange(len(positions))
            firsts = self.first_slots(positions, self.length + len(positions))
            seen = np.where(firsts > 0, own - firsts + 1, 0)
            ends = [*(np.flatnonzero(np.diff(seen)) + 1), len(seen)]
            if len(ends) > 1:
                return self._in_runs(ends, tokens, positions, outputs)
            self._window[...] = seen[0]
        runs = 1 if query or not self._context.most_rows else -(-len(tokens) // self._context.most_rows)
        if runs < 2:
            return super().append(tokens, positions, query=query, outputs=outputs)
        sizes = [len(part) for part in np.array_split(positions, runs)]
        return self._in_runs(np.cumsum(sizes), tokens, positions, outputs)

    def _in_runs(
        self, ends: Sequence[int] | Ids, tokens: TokenStates, positions: Ids, outputs: Ids | None
    ) -> HiddenStates:
        """`append` in several runs, which end before these tokens."""
        hidden, first = [], 0
        for end in map(int, ends):
            part = None if outputs is None else outputs[(first <= outputs) & (outputs < end)] - first
            hidden.append(self.append(tokens.part(first, end), positions[first:end], outputs=part).copy())
            first = end
        return np.concatenate(hidden)

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        out = self._compute(tokens, positions, np.arange(len(tokens), dtype=np.int32))
        if query:
            self._query = self._ran.get_tensor(names.QUERY).data.copy()
        return out

    def _run_for(self, outputs: Ids, tokens: TokenStates, positions: Ids) -> HiddenStates:
        computed = outputs if len(outputs) else np.zeros(1, np.int64)  # engines differ in empty products
        return self._compute(tokens, positions, computed.astype(np.int32))[: len(outputs)]

    def _compute(self, tokens: TokenStates, positions: Ids, outputs: NDArray[np.int32]) -> HiddenStates:
        """Run the stage; the hidden states of the tokens `outputs`, at least one."""
        self._stage.check_open()
        count, rope = len(tokens), self._context.rope
        own_rope: dict[str, NDArray[np.float32]] = {}  # tables of these tokens alone
        if positions.ndim > 1:
            axes = self._context.model.rope.axes
            cos, sin = rope_at((rope[names.COS], rope[names.SIN]), axes, positions)
            own_rope, positions = {names.COS: cos, names.SIN: sin}, np.arange(count)
        if count == 1:
            self._row.hidden[:], self._row_position[:] = tokens.hidden, positions
            for name, row in self._row.inputs.items():
                row[:] = tokens.inputs[name]
            tensors, out = self._row_tensors, self._row_out
        else:
            out = np.empty((len(outputs), tokens.hidden.shape[1]), np.float32)
            tensors = self._tensors(tokens, positions[None].copy(), outputs, out)
        self._ran = self._for_many if self._for_many is not None and count > FEW else self._request
        with run_failures(ENGINE, self._stage.name):
            try:
                for name, table in own_rope.items():
                    self._set(name, self._context.shared(table))
                if tensors is not self._bound:
                    self._bound = None  # until all are set
                    for name, tensor in tensors:
                        self._set(name, tensor)
                    self._bound = tensors
                filled = self.length + count
                self._past[0], self._begins[1], self._filled[...] = self.length, count, filled
                blocks = -(-filled // BLOCK)  # the attention's buffers fit those in use: more overflow them
                if blocks != self._block_begins[1]:
                    self._block_begins[1] = 0  # until they are set
                    self._set(BLOCKS, self._context.shared(self._block_numbers[:blocks]))
                    self._block_begins[1] = blocks
                if self.states is not None:
                    ends = self.states.ends(self.length, count)
                    past = np.ascontiguousarray(self.states.at(self.length)[:, None])
                    self._set(names.STATE, self._context.shared(past))
                    self._set(names.STATE_ENDS, self._context.shared(ends))
                if count == 1:
                    run_row(self._ran, out)
                else:
                    run_request(self._ran)
                if self.states is not None:
                    self.states.put(self.length, ends, self._ran.get_tensor(names.STATE_OUT).data)
            finally:
                for name in own_rope:
                    self._set(name, self._context.shared(rope[name]))
        return out

    def attention(self, *, last_only: bool = False) -> Scores:
        score = self._context.score
        assert score is not None
        key = self._last_keys()[None].astype(self._context.key, copy=False)
        query, filled = self._query[-1:] if last_only else self._query, np.array([self.length], np.int32)
        outputs = score.run({names.QUERY: query, names.KEY: key, names.TOTAL_SLOTS: filled})
        return outputs[names.ATTENTION_SUM], outputs[names.ATTENTION_MAX]

    def keys(self) -> NDArray[np.float32]:
        return self._last_keys().astype(np.float32)

    def _last_keys(self) -> NDArray[Any]:
        """The last layer's keys, [kv_heads, length, head_dim], as numbers; numpy holds bfloat16 by its bits."""
        return self.numbers(-1, 0)

    def numbers(self, layer: int, part: int) -> NDArray[Any]:
        """Keys (`part` 0) or values of the n-th cached layer, [kv_heads, length, head_dim]."""
        keys = self.kv[layer][part, : -(-self.length // BLOCK)].swapaxes(0, 1)
        keys = keys.reshape(len(keys), -1, keys.shape[-1])[:, : self.length]
        if keys.dtype == np.uint8:
            scale, zero = np.moveaxis(np.ascontiguousarray(keys[..., :ROW_SCALE_BYTES]).view(np.float32), -1, 0)
            numbers: NDArray[np.float32] = (keys[..., ROW_SCALE_BYTES:] - zero[..., None]) * scale[..., None]
            return numbers
        return (keys.astype(np.uint32) << 16).view(np.float32) if keys.dtype == np.uint16 else keys

    def _read(self, slots: Ids) -> list[NDArray[Any]]:
        return [layer[:, slots // BLOCK, :, slots % BLOCK] for layer in self.kv]

    def _write(self, slots: Ids, kv: list[NDArray[Any]], length: int) -> None:
        for layer, part in zip(self.kv, kv, strict=True):
            layer[:, slots // BLOCK, :, slots % BLOCK] = part

    def _copy(self, other: OpenvinoStageCache, length: int) -> None:
        blocks = -(-length // BLOCK)
        for mine, theirs in zip(self.kv, other.kv, strict=True):
            mine[:, :blocks] = theirs[:, :blocks]

    def _set(self, name: str, tensor: Any) -> None:
        self._request.set_tensor(name, tensor)
        if self._for_many is not None:
            self._for_many.set_tensor(name, tensor)

    def _tensors(
        self, tokens: TokenStates, positions: NDArray[np.int64], outputs: NDArray[np.int32], out: HiddenStates
    ) -> tuple[tuple[str, Any], ...]:
        """Tensors over the arrays' own memory; they hold it, and must live as long as they are bound."""
        arrays: list[tuple[str, NDArray[Any]]] = [(names.HIDDEN, tokens.hidden), (names.POSITIONS, positions)]
        arrays += [(OUTPUTS, outputs), (names.HIDDEN_OUT, out)]
        arrays += [(names.token_input(name), tokens.inputs[name]) for name in self._reads]
        return tuple((name, self._context.shared(np.ascontiguousarray(array))) for name, array in arrays)
