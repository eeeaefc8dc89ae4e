"""Matrices of an int4 decoder that are int8, so that its weights have a mean number of bits.

The head's rows of frequent tokens are the first: those with small numbers, as vocabularies of byte pairs are numbered
in the order of merging, and the last ones: added tokens, and the single characters that SentencePiece numbers last
(from 29,871 of 32,000 on in Llama's, from 236,743 of 262,208 on in Gemma 3's). v, k and o come next, then all others
from the last layer on: the order of what they were measured to cost for a bit.
Of Qwen2.5-Coder 0.5B, whose KL is 0.058 nats in int4, v alone has 0.0115, k 0.0034, o 0.0062, up 0.0140, down 0.0133,
gate 0.0103 and q 0.0018; gate, up and down are 38 times as large as k and v, o and q 7 times. Up, down and gate of the
last three layers have 0.0064, of layers 18 to 20 0.0033, and of three layers before 0.0021 to 0.0026. A head in int4
has 0.0155, and 0.0038 with its first ninth in int8.

Experts stay int4: engines read all their matrices in one precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil, floor, prod

from vtx.runtime.bundle.safetensors import DTYPES
from vtx.runtime.bundle.spec.stored import EXPERTS, HEADS, Precisions, multiplied, part_of
from vtx.runtime.errors import RequestError
from vtx.runtime.precision import PRECISIONS

Shape = tuple[int, ...]
# Ends of names; all other matrices have the last turn.
TURNS = ("head.first", "head.last"), ("v_proj",), ("k_proj",), ("o_proj", "out_proj")
FREQUENT = 8  # parts of a head's rows, of which the first is int8
ADDED = 2304  # rows at its end, with Llama's characters
LARGE = 250_000  # rows of a head that are Gemma's
CHARACTERS = 26_000  # rows at the end of these


def widened(precisions: Precisions, tensors: Iterable[tuple[str, Shape]], bits: float) -> Precisions:
    """`precisions` with as many matrices in int8 as a mean of `bits` a weight of decoder and head allows.

    `tensors`: names and shapes of all. Raises RequestError for a mean that is out of reach.
    """
    matrices = _matrices(tensors)
    candidates = [name for name in matrices if PRECISIONS[precisions.of(name)].bits == 4 and EXPERTS not in name]
    widest = replace(precisions, wider=frozenset(candidates))
    least = _bits(precisions, matrices)
    most = _bits(widest, matrices)
    weights = sum(map(prod, matrices.values()))
    room = bits * weights - sum(least.values())
    if not 0 <= room <= sum(most.values()) - sum(least.values()):
        low = ceil(100 * sum(least.values()) / weights) / 100
        high = floor(100 * sum(most.values()) / weights) / 100
        raise RequestError(
            f"--bits {bits:g} is out of reach: the weights of this decoder and its head take {low:g} bits in the mean "
            f"with int4 alone and {high:g} with int8; name a number between, or other blocks or --head-precision"
        )
    wider = set[str]()
    for name in sorted(candidates, key=_priority):
        more = most[name] - least[name]
        if 0 < more <= room:
            wider.add(name)
            room -= more
    return replace(precisions, wider=frozenset(wider))


def head_rows(count: int) -> dict[str, range]:
    """The rows of each part of a head of `count` rows."""
    first = count // FREQUENT
    end = CHARACTERS if count > LARGE else ADDED
    last = count - min(end, first)
    return dict(zip(HEADS, (range(first), range(first, last), range(last, count)), strict=True))


def mean_bits(precisions: Precisions, tensors: Iterable[tuple[str, Shape]]) -> float:
    """The mean bits of the weights of decoder and head, of `tensors` by name and shape."""
    matrices = _matrices(tensors)
    return sum(_bits(precisions, matrices).values()) / sum(map(prod, matrices.values()))


def _matrices(tensors: Iterable[tuple[str, Shape]]) -> dict[str, Shape]:
    """The matrices of the decoder and its head."""
    return {name: shape for name, shape in tensors if part_of(name) != "vision" and multiplied(name, shape)}


def _bits(precisions: Precisions, matrices: Mapping[str, Shape]) -> dict[str, float]:
    """The bits of each matrix, with its scales and zero points."""
    sizes = dict[str, float]()
    for name, shape in matrices.items():
        dtype, scheme = precisions.stored(name, shape, "F16")
        sizes[name] = prod(shape) * (DTYPES[dtype][0] if scheme is None else scheme.bits_of_a_weight)
    return sizes


def _priority(name: str) -> tuple[int, int, str]:
    """The key that sorts matrices: the turn of their kind, then the layer from the last one on."""
    kind = name.removesuffix(".weight")
    turn = next((turn for turn, ends in enumerate(TURNS) if kind.endswith(ends)), len(TURNS))
    layer = next((int(part) for part in name.split(".") if part.isdecimal()), 0)
    return turn, -layer, name
