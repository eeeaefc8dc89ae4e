"""Rows to heads and back, for the dialects whose attention wants heads on an axis of their own."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.builder import Builder


def split_heads(b: Builder, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
    """[batch, rows, heads * head_dim] to [batch, heads, rows, head_dim]."""
    return b.op("Transpose", b.reshape(x, 0, 0, heads, head_dim), perm=[0, 2, 1, 3])


def join_heads(b: Builder, x: ir.Value, width: int) -> ir.Value:
    """[batch, heads, rows, head_dim] to [batch, rows, width]."""
    return b.reshape(b.op("Transpose", x, perm=[0, 2, 1, 3]), 0, 0, width)
