"""What a dialect must say: the operations that engines write differently, and the types they compute in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import onnx_ir as ir

from vtx.exporter.checkpoint.config import TextConfig

if TYPE_CHECKING:
    from vtx.exporter.graphs.builder import Builder


class StageAttention(Protocol):
    """Causal attention of one stage under construction, by KV slot; making one declares the stage's inputs for it.

    `split` brings rows [rows, heads * head_dim] into the layout that `rotate` and `attend` work in, `join` back.
    """

    def split(self, x: ir.Value, heads: int) -> ir.Value: ...

    def rotate(self, x: ir.Value, heads: int) -> ir.Value:
        """Rotary embedding by the rows' positions, which are not their KV slots once vision rows have left."""
        ...

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        """Append K and V to the layer's cache, its input here, and let every row see its own slot and those before."""
        ...

    def join(self, x: ir.Value) -> ir.Value: ...

    def finish(self) -> None:
        """Declare the caches of all layers as outputs."""
        ...


class Dialect(Protocol):
    """One operator set. `compute` is the type of the arithmetic; rows cross a graph's boundary in float32."""

    @property
    def name(self) -> str: ...

    @property
    def opsets(self) -> Mapping[str, int]: ...

    @property
    def ir_version(self) -> int: ...

    @property
    def compute(self) -> ir.DataType: ...

    @property
    def capacity(self) -> int | None:
        """Slots of every cache, where the graphs fix them; then no tensor may be as large as another one says."""
        ...

    @property
    def sizes_from_values(self) -> bool:
        """Whether a tensor may have as many rows as values say; where not, rows stay and a mask hides them."""
        ...

    def filled(self, b: Builder, keys: ir.Value, total: ir.Value) -> ir.Value:
        """Of a layer's keys [1, kv_heads, slots, head_dim] the first `total` [1] int64, or all where a mask must do."""
        ...

    def norm(self, b: Builder, x: ir.Value, weight: str, eps: float) -> ir.Value:
        """RMS norm over the last axis, computed in float32."""
        ...

    def add_norm(
        self, b: Builder, delta: ir.Value, total: ir.Value, weight: str, eps: float
    ) -> tuple[ir.Value, ir.Value]:
        """(norm(total + delta), total + delta)."""
        ...

    def layer_norm(self, b: Builder, x: ir.Value, name: str, eps: float) -> ir.Value:
        """Layer norm over the last axis with `name`.weight and `name`.bias, computed in float32."""
        ...

    def quantised(self, b: Builder, x: ir.Value, weight: str, bias: str | None) -> ir.Value:
        """X @ W^T (+ b) with the quantised matrix W of that name."""
        ...

    def gelu(self, b: Builder, x: ir.Value, *, tanh: bool) -> ir.Value:
        """Exact GELU, or its tanh approximation."""
        ...

    def swish(self, b: Builder, x: ir.Value, rate: float) -> ir.Value:
        """X * sigmoid(rate * x)."""
        ...

    def mish(self, b: Builder, x: ir.Value) -> ir.Value:
        """X * tanh(softplus(x))."""
        ...

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType) -> StageAttention: ...

    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: int, head_dim: int, seen: ir.Value | None
    ) -> ir.Value:
        """Attention of every row to every other; all of [images, rows, hidden].

        `seen` [1, 1, 1, rows] bool: the rows that are attended to, None for all. It is given only where
        `sizes_from_values` is false; the number of rows may be known at run time only where that is true.
        """
        ...
