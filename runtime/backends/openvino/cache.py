"""K and V of a stage on OpenVINO: blocks in arrays of ours, which the engine's paged attention reads and fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.memory import zeros_in_small_pages
from vtx.runtime.backends.openvino.paged import BEGINS, BLOCK, BLOCK_BEGINS, BLOCKS, FILLED, PAST
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import Ids, Rows, Scores

if TYPE_CHECKING:
    from vtx.runtime.backends.openvino.backend import OpenvinoBackend

# Of what K and V are arrays: bfloat16's bits; in u8 a row of a head is its scale, its zero point, and its numbers.
KV_ARRAYS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
ROW_SCALE_BYTES = 8  # both in float32, found when the row is written


class OpenvinoStageCache:
    """`StageCache` whose K and V are arrays of blocks, which an infer request over the stage's graph reads and fills.

    Slots are forgotten by being counted no longer. One row, as in decoding, runs through tensors made once.
    """

    def __init__(self, backend: OpenvinoBackend, compiled: Any, spec: StageSpec, capacity: int) -> None:
        self._backend, self.capacity = backend, capacity
        self._tensor = backend._openvino.Tensor
        self._request = compiled.create_infer_request()
        self.length = 0
        model, blocks = backend._manifest.model, -(-capacity // BLOCK)
        shape = (spec.layers, 2, blocks, model.kv_heads, BLOCK, backend.kv_width)
        self._kv = zeros_in_small_pages(shape, np.dtype(KV_ARRAYS[backend._kv]))
        for layer, (keys, values) in zip(range(spec.first, spec.last + 1), self._kv, strict=True):
            self._set(names.past_key(layer), self._blocks(keys))
            self._set(names.past_value(layer), self._blocks(values))
        for name, table in zip((names.COS, names.SIN), backend._rope, strict=True):
            self._set(name, self._shared(table))
        self._past, self._begins, self._filled = np.zeros(1, np.int32), np.zeros(2, np.int32), np.array(0, np.int32)
        self._block_begins, self._block_numbers = np.zeros(2, np.int32), np.arange(blocks, dtype=np.int32)
        said = (PAST, self._past), (BEGINS, self._begins), (FILLED, self._filled), (BLOCK_BEGINS, self._block_begins)
        for name, array in said:
            self._set(name, self._shared(array))
        hidden = model.hidden
        self._row, self._row_position, self._row_out = (
            np.zeros((1, hidden), np.float32), np.zeros((1, 1), np.int64), np.zeros((1, hidden), np.float32),
        )  # fmt: skip
        self._row_tensors = self._tensors(self._row, self._row_position, self._row_out)
        self._query = np.zeros((0, 0), np.float32)
        self._bound: Any = None

    def append(self, rows: Rows, positions: Ids, *, query: bool = False) -> Rows:
        count = len(rows)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} rows in a cache of {self.capacity}")
        if count == 1:
            self._row[:], self._row_position[:] = rows, positions
            tensors, out = self._row_tensors, self._row_out
        else:
            out = np.empty_like(rows)
            tensors = self._tensors(np.ascontiguousarray(rows), positions[None].copy(), out)
        self._bind(tensors)
        self._say(count)
        self._request.infer(share_outputs=True)
        if query:
            self._query = self._request.get_tensor(names.QUERY).data.copy()
        self.length += count
        return out

    def keep(self, length: int) -> None:
        assert length <= self.length, (length, self.length)
        self.length = length

    def attention(self, *, last_only: bool = False) -> Scores:
        return self._backend.scores(self._query[-1:] if last_only else self._query, self._last_keys()[None])

    def keys(self) -> NDArray[np.float32]:
        return self._last_keys().astype(np.float32)

    def _last_keys(self) -> NDArray[Any]:
        """The last layer's keys, [kv_heads, length, head_dim]."""
        keys = self._kv[-1, 0, : -(-self.length // BLOCK)].swapaxes(0, 1)
        return _wide(keys.reshape(len(keys), -1, keys.shape[-1])[:, : self.length])

    def read(self, slots: Ids) -> NDArray[Any]:
        return self._kv[:, :, slots // BLOCK, :, slots % BLOCK]

    def write(self, slots: Ids, kv: NDArray[Any], *, length: int) -> None:
        self._kv[:, :, slots // BLOCK, :, slots % BLOCK] = kv
        self.length = length

    def _say(self, count: int) -> None:
        """Tell the attention where `count` rows go. Its buffers are made for the blocks in use: more would overflow."""
        filled = self.length + count
        self._past[0], self._begins[1], self._filled[...] = self.length, count, filled
        blocks = -(-filled // BLOCK)
        if blocks != self._block_begins[1]:
            self._block_begins[1] = blocks
            self._set(BLOCKS, self._shared(self._block_numbers[:blocks]))

    def _blocks(self, array: NDArray[Any]) -> Any:
        """A tensor over K or V of a layer."""
        if self._backend._kv == "bf16":
            return self._tensor(array, array.shape, self._backend._openvino.Type.bf16)
        return self._shared(array)

    def _shared(self, array: NDArray[Any]) -> Any:
        return self._tensor(array, shared_memory=True)

    def _set(self, name: str, tensor: Any) -> None:
        self._request.set_tensor(name, tensor)

    def _tensors(self, rows: Rows, positions: NDArray[np.int64], out: Rows) -> tuple[tuple[str, Any], ...]:
        """Tensors over the arrays' own memory, which must live as long as they are bound: they hold it."""
        arrays = ((names.HIDDEN, rows), (names.POSITIONS, positions), (names.HIDDEN_OUT, out))
        return tuple((name, self._shared(array)) for name, array in arrays)

    def _bind(self, tensors: tuple[tuple[str, Any], ...]) -> None:
        if tensors is self._bound:
            return
        for name, tensor in tensors:
            self._set(name, tensor)
        self._bound = tensors


def _wide(kv: NDArray[Any]) -> NDArray[Any]:
    """K or V as numbers: bfloat16, which numpy lacks, is held by its bits, the upper half of a float32's."""
    if kv.dtype == np.uint8:
        scale, zero = np.moveaxis(np.ascontiguousarray(kv[..., :ROW_SCALE_BYTES]).view(np.float32), -1, 0)
        numbers: NDArray[np.float32] = (kv[..., ROW_SCALE_BYTES:] - zero[..., None]) * scale[..., None]
        return numbers
    return (kv.astype(np.uint32) << 16).view(np.float32) if kv.dtype == np.uint16 else kv
