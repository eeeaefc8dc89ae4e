"""K and V of a stage on OpenVINO: blocks in arrays of ours, which the engine's paged attention reads and fills."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.failures import run_failures
from vtx.runtime.backends.openvino.blocks import BlockPool
from vtx.runtime.backends.openvino.graph import ENGINE, OpenvinoGraph, StageGraph, run_request, run_row
from vtx.runtime.backends.openvino.paged import (
    BEGINS,
    BLOCK,
    BLOCK_BEGINS,
    BLOCKS,
    FILLED,
    IMAGES,
    OUTPUTS,
    PAST,
    SLIDING,
    WINDOW,
)
from vtx.runtime.backends.slots import SlotCounter, StateHistory, begin_of_group, run_ends
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec, TokenInput
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.bundle.tensors import rope_at
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.installing import pip_install
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

# Element types of K and V: bfloat16 by its bits; in u8 a slot of a head is its scale, zero point, and numbers.
KV_ARRAYS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
FEW = 8  # tokens at most that run over the narrow weights if there is a form for many
ROW_SCALE_BYTES = 8  # both in float32, computed when the slot is written
Bind = Callable[[str, NDArray[Any]], None]  # gives an input of a request an array


@dataclass(frozen=True, slots=True)
class OpenvinoCacheContext:
    """Shared by the caches of a bundle. `kv` is the type of K and V, one of `KV_ARRAYS`; `key`: of the score graph.

    `most_rows`: the most hidden states of one run, None for any number. `key_scales` [1, kv_heads, 1, head_dim], by
    layer: keys in u8 are divided by them.
    """

    openvino: Any
    model: ModelSpec
    kv: str
    rope: Mapping[str, NDArray[np.float32]]
    score: OpenvinoGraph | None
    key: np.dtype[Any]
    most_rows: int | None = None
    token_inputs: tuple[TokenInput, ...] = ()
    key_scales: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one layer, K and V of all heads; the mean of the layers that keep them."""
        width = self.model.mean_head_dim + (ROW_SCALE_BYTES if self.kv == "u8" else 0)
        return round(2 * self.model.kv_heads * width * np.dtype(KV_ARRAYS[self.kv]).itemsize)

    def pool(self, spec: StageSpec, caches: int, capacity: int, *, reserved: bool = False) -> BlockPool:
        """Blocks for this number of caches of a stage."""
        scales = ROW_SCALE_BYTES if self.kv == "u8" else 0
        shapes = [(self.model.kv_heads, BLOCK, self.model.heads_of(layer) + scales) for layer in spec.cached]
        return BlockPool(shapes, caches, blocks_of(capacity), np.dtype(KV_ARRAYS[self.kv]), reserved=reserved)

    def shared(self, array: NDArray[Any]) -> Any:
        return self.openvino.Tensor(array, shared_memory=True)

    def blocks(self, array: NDArray[Any]) -> Any:
        if self.kv == "bf16":
            return self.openvino.Tensor(array, array.shape, self.openvino.Type.bf16)
        return self.shared(array)


class SlidingRun(NamedTuple):
    """Tokens up to `end`, which see `window` slots in layers that slide, or, if it is 0, all from slot `first` on."""

    end: int
    window: int = 0
    first: int = 0


class RunSlots:
    """The inputs of attention that say which blocks have a run's slots: those before it, filled, and its own."""

    def __init__(self, prefix: str = "") -> None:
        self._past = np.zeros(1, np.int32)
        self._filled = np.array(0, np.int32)
        self._begins = np.zeros(2, np.int32)
        self._first = 0
        self.bound_once = {
            prefix + PAST: self._past,
            prefix + FILLED: self._filled,
            prefix + BLOCK_BEGINS: self._begins,
        }
        self._blocks = prefix + BLOCKS

    def place(self, bind: Bind, before: int, count: int, numbers: NDArray[np.int32], first: int = 0) -> None:
        """Have `count` new slots behind `before` others, in the blocks of these numbers from the `first` on."""
        self._past[0], self._filled[...] = before, before + count
        blocks = blocks_of(before + count)  # the attention's buffers fit those in use: more overflow them
        if blocks != self._begins[1] or first != self._first:
            self._begins[1] = 0  # until they are set
            bind(self._blocks, numbers[first : first + blocks])
            self._begins[1], self._first = blocks, first


def blocks_of(slots: int) -> int:
    """The number of blocks that have this number of slots."""
    return -(-slots // BLOCK)


def run_ends_of_equal(values: Ids) -> Ids:
    """Of each value, the end of the run of equal ones that it is in."""
    ends = np.append(np.flatnonzero(np.diff(values)) + 1, len(values))
    return ends[np.searchsorted(ends, np.arange(len(values)), side="right")]


class OpenvinoStageCache(SlotCounter):
    """`StageCache` whose K and V are arrays of blocks, which an infer request over the stage's graph reads and fills.

    `kv` is [2, blocks, kv_heads, slots of a block, slot width] of each layer, of the pool if one is given that has
    room, else of its own; `table` says which blocks of it are this cache's. One token, as in decoding, runs through
    tensors made once.
    """

    def __init__(
        self,
        context: OpenvinoCacheContext,
        stage: StageGraph,
        spec: StageSpec,
        capacity: int,
        pool: BlockPool | None = None,
    ) -> None:
        sliding = context.model.sliding
        states = StateHistory(spec, context.model) if spec.stateful else None
        super().__init__(capacity, None if sliding is None else sliding.window, states)
        self.selects_outputs = spec.last in spec.cached
        self._context = context
        self._stage = stage
        self.spec = spec
        self._reads = spec.inputs
        self._request = stage.request()
        many = stage.for_many
        self._for_many = None if many is None else many.create_infer_request()
        self._ran = self._request
        model = context.model
        blocks = blocks_of(capacity)
        table = pool.take(blocks) if pool is not None else None
        self.lane = None if table is None else table.lane
        if pool is None or table is None:
            pool = context.pool(spec, 1, capacity, reserved=True)
            table = pool.take(blocks)
        assert table is not None
        self.pool = pool
        self.table = table
        self.kv = pool.kv
        if self.lane is not None:
            weakref.finalize(self, pool.give_back, table).atexit = False
        for layer, (keys, values) in zip(spec.cached, self.kv, strict=True):
            self._set(names.past_key(layer), context.blocks(keys))
            self._set(names.past_value(layer), context.blocks(values))
        self._begins = np.zeros(2, np.int32)
        self._slots = RunSlots()
        self._window = np.array(0, np.int32)
        self._run_now = SlidingRun(0)
        bound_once = {**context.rope, BEGINS: self._begins, **self._slots.bound_once}
        self._slots_of_sliding: RunSlots | None = None
        self._sliding: list[NDArray[Any]] = []  # of `kv`
        if sliding is not None:
            self._slots_of_sliding = RunSlots(SLIDING)
            bound_once |= {WINDOW: self._window, **self._slots_of_sliding.bound_once}
            self._sliding = [kv for layer, kv in zip(spec.cached, self.kv, strict=True) if layer in sliding.layers]
        for name, array in bound_once.items():
            self._bind_array(name, array)
        self._row_out = np.zeros((1, model.hidden), np.float32)
        self._row_position = np.zeros((1, 1), np.int64)
        widths = {declared.name: declared.width for declared in context.token_inputs}
        row_inputs = {name: np.zeros((1, widths[name]), np.float32) for name in spec.inputs}
        self._row = TokenStates(np.zeros((1, model.hidden), np.float32), row_inputs)
        self._row_tensors = self._tensors(self._row, self._row_position, np.zeros(1, np.int32), self._row_out)
        self._query = np.zeros((0, 0), np.float32)
        self._bound: Any = None

    @property
    def resident(self) -> int:
        return min(self.capacity, self.pool.slots(self.table))

    def hold(self, first: int, end: int) -> None:
        """Have the blocks of the slots before `end`, those of slots from `first` on for this cache alone."""
        self.pool.hold(self.table, first // BLOCK, blocks_of(end))

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        """See `StageCache`. Many tokens go in runs of nearly the same size, which gives the same hidden states.

        So do tokens that see another number of slots in layers that slide. Tokens of a group go in one.
        """
        if self.positions is None and len(tokens) <= (self._context.most_rows or len(tokens)):
            return super().append(tokens, positions, query=query, outputs=outputs)
        most = self._context.most_rows
        runs = list[SlidingRun]()
        first = 0
        for run in self.runs(tokens, positions):
            runs += [run._replace(end=end) for end in run_ends(tokens, first, run.end, most)]
            first = run.end
        hidden = list[HiddenStates]()
        queries = list[NDArray[np.float32]]()
        first = 0
        for run in runs:
            self._run_now = run
            if len(runs) == 1:
                return super().append(tokens, positions, query=query, outputs=outputs)
            part = None if outputs is None else outputs[(first <= outputs) & (outputs < run.end)] - first
            piece = super().append(tokens.part(first, run.end), positions[first : run.end], query=query, outputs=part)
            hidden.append(piece.copy())
            queries.append(self._query)
            first = run.end
        if query:
            self._query = np.concatenate(queries)
        return np.concatenate(hidden)

    def runs(self, tokens: TokenStates, positions: Ids) -> list[SlidingRun]:
        """As few runs of these tokens as the engine allows, whose layers that slide see one number of slots in a run.

        Where tokens see all from one slot on instead, as behind an image that was withdrawn, these slots are copied
        to blocks that nothing else is in. Their positions are noted. Raises RequestError: the tokens of an image would
        have to go in several runs.
        """
        count = len(positions)
        if self.positions is None:
            return [SlidingRun(count)]
        self.place(positions)
        numbers = self.length + np.arange(count)
        firsts = self.first_slots(positions, self.length + count)
        windows = np.where(firsts > 0, numbers - firsts + 1, 0)
        ends_of_window, ends_of_first = run_ends_of_equal(windows), run_ends_of_equal(firsts)
        runs = list[SlidingRun]()
        while not runs or runs[-1].end < count:
            at = runs[-1].end if runs else 0
            end = int(ends_of_window[at])
            if not windows[at] and end < count and numbers[end - 1] < windows[end]:  # these see fewer than the next
                end = int(ends_of_window[end])
            from_first = SlidingRun(int(ends_of_first[at]), first=int(firsts[at]))
            copied = from_first.first and from_first.end > end and self._has_room_for(from_first)
            runs.append(from_first if copied else SlidingRun(end, window=int(windows[end - 1])))
        if any(begin_of_group(tokens, run.end) != run.end for run in runs):
            raise RequestError(
                "OpenVINO runs an image at once, and its tokens see different numbers of slots in layers that slide, "
                "since a reduction left some out within the window; use --reduce none or --device cpu"
            )
        return runs

    def _has_room_for(self, run: SlidingRun) -> bool:
        """True if the slots that a run's tokens see fit behind its own."""
        filled = self.length + run.end
        return blocks_of(filled) + blocks_of(filled - run.first) <= len(self.table.numbers)

    def _place(self, count: int) -> None:
        """Tell attention the slots of `count` new tokens, and those that they see in layers that slide."""
        filled, first = self.length + count, self._run_now.first
        self.hold(self.length, filled)
        self._begins[1] = count
        self._slots.place(self._bind_array, self.length, count, self.table.numbers)
        if self._slots_of_sliding is None:
            return
        self._window[...] = self._run_now.window
        block = blocks_of(filled) if first else 0
        if first:
            self.hold(block * BLOCK, block * BLOCK + filled - first)
            self._copy_sliding(np.arange(first, self.length), block * BLOCK - first)
        self._slots_of_sliding.place(self._bind_array, self.length - first, count, self.table.numbers, block)

    def _take_copies(self, count: int) -> None:
        """Have the slots of a run's tokens, which layers that slide filled in other blocks."""
        first, filled = self._run_now.first, self.length + count
        if first:
            distance = blocks_of(filled) * BLOCK - first
            self._copy_sliding(np.arange(self.length, filled) + distance, -distance)

    def _copy_sliding(self, slots: Ids, distance: int) -> None:
        """Copy K and V of layers that slide to other slots of this cache."""
        copies = slots + distance
        blocks, new_blocks = self.table.numbers[slots // BLOCK], self.table.numbers[copies // BLOCK]
        for kv in self._sliding:
            kv[:, new_blocks, :, copies % BLOCK] = kv[:, blocks, :, slots % BLOCK]

    def check_both_ways(self, tokens: TokenStates) -> None:
        """Raise DeviceError if the engine's attention is causal for these two tokens of an image, too."""
        noise = np.random.default_rng(0).standard_normal(tokens.hidden.shape, dtype=np.float32)
        outputs = list[HiddenStates]()
        for group in (-1, 0):
            self.keep(0)
            inputs = TokenStates(noise, {**tokens.inputs, names.GROUP: np.full((len(noise), 1), group, np.float32)})
            outputs.append(self.append(inputs, np.arange(len(noise)))[0].copy())
        if np.array_equal(outputs[0], outputs[1]):
            raise DeviceError(
                "this release of OpenVINO cannot let the tokens of an image see each other both ways; "
                f"{pip_install()} -U openvino, or use --device cpu"
            )

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        out = self._compute(tokens, positions, np.arange(len(tokens), dtype=np.int32))
        if query:
            self._query = self._ran.get_tensor(names.QUERY).data.copy()
        return out

    def _run_for(self, outputs: Ids, tokens: TokenStates, positions: Ids) -> HiddenStates:
        computed = outputs if len(outputs) else np.zeros(1, np.int64)  # engines differ in empty products
        return self._compute(tokens, positions, computed.astype(np.int32))[: len(outputs)]

    def _request_for(self, count: int) -> Any:
        """The request over the form of the weights that is the quicker for this number of tokens."""
        return self._for_many if self._for_many is not None and count > FEW else self._request

    def _compute(self, tokens: TokenStates, positions: Ids, outputs: NDArray[np.int32]) -> HiddenStates:
        """Run the stage; the hidden states of the tokens `outputs`, at least one."""
        self._stage.check_open()
        count = len(tokens)
        rope = self._context.rope
        own_rope: dict[str, NDArray[np.float32]] = {}  # tables of these tokens alone
        if positions.ndim > 1:
            axes = self._context.model.rope.axes
            cos, sin = rope_at((rope[names.COS], rope[names.SIN]), axes, positions)
            own_rope = {names.COS: cos, names.SIN: sin}
            positions = np.arange(count)
        if count == 1:
            self._row.hidden[:], self._row_position[:] = tokens.hidden, positions
            for name, row in self._row.inputs.items():
                row[:] = tokens.inputs[name]
            tensors = self._row_tensors
            out = self._row_out
        else:
            out = np.empty((len(outputs), tokens.hidden.shape[1]), np.float32)
            tensors = self._tensors(tokens, positions[None].copy(), outputs, out)
        self._ran = self._request_for(count)
        with run_failures(ENGINE, self._stage.name):
            try:
                for name, table in own_rope.items():
                    self._set(name, self._context.shared(table))
                if tensors is not self._bound:
                    self._bound = None  # until all are set
                    for name, tensor in tensors:
                        self._set(name, tensor)
                    self._bound = tensors
                self._place(count)
                if self.states is not None:
                    ends = self.states.ends(self.length, count)
                    states = self.states.room(len(ends))
                    parts = self._stage.states
                    room = parts.room(states)
                    inputs: dict[str, NDArray[Any]] = {names.STATE_ENDS: ends}
                    inputs |= parts.given(self.states.before(self.length))
                    for name, array in (*inputs.items(), *room.items()):
                        self._set(name, self._context.shared(array))
                if count == 1:
                    run_row(self._ran, out)
                else:
                    run_request(self._ran)
                self._take_copies(count)
                if self.states is not None:
                    self.states.put(self.length, ends, parts.put(states, room.__getitem__) if len(ends) > 1 else states)
            finally:
                for name in own_rope:
                    self._set(name, self._context.shared(rope[name]))
        return out

    def attention(self, *, last_only: bool = False) -> Scores:
        score = self._context.score
        assert score is not None
        key = self._last_keys()[None].astype(self._context.key, copy=False)
        query = self._query[-1:] if last_only else self._query
        filled = np.array([self.length], np.int32)
        outputs = score.run({names.QUERY: query, names.KEY: key, names.TOTAL_SLOTS: filled})
        return outputs[names.ATTENTION_SUM], outputs[names.ATTENTION_MAX]

    def keys(self) -> NDArray[np.float32]:
        return self._last_keys().astype(np.float32)

    def _last_keys(self) -> NDArray[Any]:
        """The last layer's keys, [kv_heads, length, head_dim], as numbers; numpy holds bfloat16 by its bits."""
        return self.numbers(-1, 0)

    def numbers(self, layer: int, part: int) -> NDArray[Any]:
        """Keys (`part` 0) or values of the n-th cached layer, [kv_heads, length, head_dim]."""
        keys: NDArray[Any] = self.kv[layer][part, self.table.numbers[: blocks_of(self.length)]].swapaxes(0, 1)
        keys = keys.reshape(len(keys), -1, keys.shape[-1])[:, : self.length]
        if keys.dtype == np.uint8:
            scale, zero = np.moveaxis(np.ascontiguousarray(keys[..., :ROW_SCALE_BYTES]).view(np.float32), -1, 0)
            numbers: NDArray[np.float32] = (keys[..., ROW_SCALE_BYTES:] - zero[..., None]) * scale[..., None]
            return numbers * self._context.key_scales[self.spec.cached[layer]][0] if part == 0 else numbers
        return (keys.astype(np.uint32) << 16).view(np.float32) if keys.dtype == np.uint16 else keys

    def _read(self, slots: Ids) -> list[NDArray[Any]]:
        blocks = self.table.numbers[slots // BLOCK]
        return [layer[:, blocks, :, slots % BLOCK] for layer in self.kv]

    def _write(self, slots: Ids, kv: list[NDArray[Any]], length: int) -> None:
        if len(slots):
            self.hold(int(slots.min()), int(slots.max()) + 1)
        blocks = self.table.numbers[slots // BLOCK]
        for layer, part in zip(self.kv, kv, strict=True):
            layer[:, blocks, :, slots % BLOCK] = part

    def _copy(self, other: OpenvinoStageCache, length: int) -> None:
        """Share the blocks that another cache of the pool has filled; copy the last one, in which both may go on."""
        blocks = length // BLOCK if other.pool is self.pool and not self.table.held else 0
        if blocks:
            self.pool.share(self.table, other.table, blocks)
        rest = np.arange(blocks * BLOCK, length)
        self.write(rest, other.read(rest), length=length)

    def _bind_array(self, name: str, array: NDArray[Any]) -> None:
        self._set(name, self._context.shared(array))

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
        if self._context.model.two_way is not None:
            groups = tokens.inputs.get(names.GROUP)  # not of a single token
            types = np.zeros(len(tokens), np.int32) if groups is None else (groups[:, 0] >= 0).astype(np.int32)
            arrays.append((IMAGES, types))
        return tuple((name, self._context.shared(np.ascontiguousarray(array))) for name, array in arrays)
