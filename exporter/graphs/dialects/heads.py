"""Heads on a separate axis, for the dialects whose attention needs it."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import INT64, Builder
from vtx.runtime.bundle.spec import names


def split_heads(b: Builder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
    """[batch, tokens, heads * head_dim] to [batch, heads, tokens, head_dim]."""
    return b.transpose(b.reshape(x, 0, 0, heads, head_dim), 0, 2, 1, 3)


def join_heads(b: Builder, x: ir.Value, width: int) -> ir.Value:
    """[batch, heads, tokens, head_dim] to [batch, tokens, width]."""
    return b.reshape(b.transpose(x, 0, 2, 1, 3), 0, 0, width)


def for_every_head(b: Builder, c: TextConfig, x: ir.Value, layer: int) -> ir.Value:
    """[batch, kv_heads, slots, head_dim] to [batch, heads, slots, head_dim]: a K/V head serves `heads / kv_heads`."""
    if c.heads == c.kv_heads:
        return x
    expanded = b.op("Expand", b.unsqueeze(x, 2), b.constant([1, 1, c.heads // c.kv_heads, 1, 1]))
    return b.reshape(expanded, 0, c.heads, -1, c.heads_of(layer))


class HeadsApart:
    """The common part of `StageAttention` on [batch, heads, tokens, head_dim]: layout, caches in and out.

    `sizes` are of the conversations and of the tokens of each.
    """

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, sizes: tuple[int | str, str]) -> None:
        self._b = b
        self._c = c
        self._kv_type = kv_type
        self._sizes = sizes
        self._positions = b.input(names.POSITIONS, INT64, sizes)
        self._seen_slots = b.input(names.SEEN_SLOTS, INT64, sizes) if c.two_way else None
        self._presents: list[tuple[ir.Value, str, int]] = []

    def split(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        return split_heads(self._b, self._b.unsqueeze(x, 0), heads, self._c.heads_of(layer))

    def join(self, x: ir.Value, layer: int) -> ir.Value:
        turned = self._b.transpose(x, 0, 2, 1, 3)
        return self._b.reshape(turned, -1, self._c.heads * self._c.heads_of(layer))

    def _past(self, layer: int, slots: str) -> tuple[ir.Value, ir.Value]:
        """The layer's K and V as inputs."""
        shape = self._shape(slots, layer)
        key = self._b.input(names.past_key(layer), self._kv_type, shape)
        return key, self._b.input(names.past_value(layer), self._kv_type, shape)

    def _keep(self, layer: int, key: ir.Value, value: ir.Value) -> None:
        self._presents += [(key, names.present_key(layer), layer), (value, names.present_value(layer), layer)]

    def _finish(self, slots: str) -> None:
        for present, name, layer in self._presents:
            self._b.output(present, name, self._kv_type, self._shape(slots, layer))

    def _shape(self, slots: str, layer: int) -> tuple[int | str, ...]:
        _, *axes = self._b.dialect.cache_shape(self._c.kv_heads, slots, self._c.heads_of(layer))
        return self._sizes[0], *axes
