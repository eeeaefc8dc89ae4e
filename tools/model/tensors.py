"""Canonical names and shapes of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Placed = Iterator[tuple[int, Shapes]]  # numbers of places, and the weights that are multiplied at each; 0: tables


def linear_tensors(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def norm_tensors(name: str, width: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def convolution_tensors(name: str, out: int, into: int, kernel: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (out, into, kernel, kernel)
    if bias:
        yield f"{name}.bias", (out,)


def products(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Multiply-accumulates at one place: of matrices and convolutions, which have 2 and 4 axes."""
    return sum(prod(shape) for _, shape in tensors if len(shape) in (2, 4))
