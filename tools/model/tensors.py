"""Canonical names and shapes of weights."""

from __future__ import annotations

from collections.abc import Iterator

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def linear_tensors(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def norm_tensors(name: str, width: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)
