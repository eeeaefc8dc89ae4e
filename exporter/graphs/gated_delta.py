"""Decoder layers with the gated delta rule in place of attention: Qwen3.5.

Each value head has a matrix S [key size, value size]. A token with key k, value v, decay exp(g) and rate beta makes it
S' = exp(g) S + beta k (v - k exp(g) S), and reads q S'. One token is computed so. Many go in chunks of up to `CHUNK`,
within which the values that the tokens write are those of a triangular system (arXiv 2406.06484, 2412.06464), and a
loop carries S from one chunk to the next. In dialects without branches all tokens of a run are one chunk, of up to
`DELTA_RUN`, and one token is computed as many are. All of it is float32, as are the states.

Queries, keys and values are convolved before, and what is read is normed and gated behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.graphs.states import END, States
from vtx.runtime.bundle.spec.graphs import DELTA_RUN
from vtx.runtime.bundle.spec.model_spec import DeltaSpec

CHUNK = 64  # a power of two
NORM = np.array(1e-6, np.float32)  # added to the square of a query's or key's length
NEVER = np.array(-1e30, np.float32)  # whose exponential is 0


class DeltaInputs(NamedTuple):
    """Each token's part in a delta rule, [conversations, value heads, tokens of each, width].

    `beta` and `decay`, a logarithm, have the width 1.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    beta: ir.Value
    decay: ir.Value


def mix_by_delta_rule(b: Builder, c: TextConfig, states: States, x: ir.Value, name: str, layer: int) -> ir.Value:
    """The layer's gated delta rule over hidden states [tokens, hidden]."""
    d = c.delta
    assert d is not None
    columns, memory = states.read(layer)
    assert memory is not None
    joined = states.apart(b.linear(x, f"{name}.in_proj_qkv", bias=False), d.channels)
    mixed, history = states.convolve(joined, columns, f"{name}.conv1d")
    parts = b.constant([d.keys, d.keys, d.values])
    q, k, v = b.ops("Split", b.to_float32(activate(b, mixed, c.activation)), parts, outputs=3, axis=-1)
    q = b.op("Mul", _of_heads(b, q, d.key_heads, d.key_dim, d.value_heads), b.single(d.key_dim**-0.5))
    k = _of_heads(b, k, d.key_heads, d.key_dim, d.value_heads)
    v = b.transpose(b.reshape(v, 0, 0, d.value_heads, d.value_dim), 0, 2, 1, 3)
    gates = []
    for part in "ba":  # [conversations, value heads, tokens of each, 1]
        numbers = states.apart(b.to_float32(b.linear(x, f"{name}.in_proj_{part}", bias=False)), d.value_heads)
        gates.append(b.unsqueeze(b.transpose(numbers, 0, 2, 1), 3))
    beta = b.op("Sigmoid", gates[0])
    steps = b.reshape(b.weight(f"{name}.dt_bias", FLOAT), -1, 1, 1)
    rate = b.op("Neg", b.op("Exp", b.reshape(b.weight(f"{name}.A_log", FLOAT), -1, 1, 1)))
    decay = b.op("Mul", b.op("Softplus", b.op("Add", gates[1], steps)), rate)
    inputs = DeltaInputs(q, k, v, beta, decay)
    heads = b.op("Concat", states.conversations, b.constant([d.value_heads, d.key_dim, d.value_dim]), axis=0)
    matrices = b.op("Reshape", memory, heads)
    count = b.size(q, 2)
    ends = b.op("Sub", states.ends, b.constant([1]))
    if b.dialect.branches:
        output, new = _by_number(b, d, matrices, inputs, ends, count)
    else:
        output, new = _at_once(b, matrices, inputs, ends, count)
    states.keep(b.op("Concat", history, b.reshape(new, 0, -1, d.memory), axis=-1))
    output = b.from_float32(b.reshape(b.transpose(output, 0, 2, 1, 3), -1, d.value_heads, d.value_dim))
    gate = b.reshape(b.linear(x, f"{name}.in_proj_z", bias=False), -1, d.value_heads, d.value_dim)
    normed = b.op("Mul", b.dialect.norm(b, output, f"{name}.norm.weight", c.eps), activate(b, gate, "silu"))
    return b.linear(b.reshape(normed, -1, d.values), f"{name}.out_proj", bias=False)


def _of_heads(b: Builder, x: ir.Value, heads: int, width: int, serving: int) -> ir.Value:
    """Queries or keys of length 1 for each value head, [conversations, value heads, tokens of each, width]."""
    x = b.reshape(x, 0, 0, heads, width)
    size = b.sum(b.op("Mul", x, x), -1, keepdims=True)
    x = b.transpose(b.op("Div", x, b.op("Sqrt", b.op("Add", size, b.constant(NORM)))), 0, 2, 1, 3)
    if serving == heads:
        return x
    shape = b.op("Concat", b.op("Shape", x, start=0, end=2), b.constant([serving // heads]), axis=0)
    shape = b.op("Concat", shape, b.op("Shape", x, start=2, end=4), axis=0)
    spread = b.op("Expand", b.unsqueeze(x, 2), shape)
    joined = b.op("Concat", b.size(x, 0), b.constant([serving, -1, width]), axis=0)
    return b.op("Reshape", spread, joined)


def _turned(b: Builder, x: ir.Value) -> ir.Value:
    """The last two of five axes swapped."""
    return b.transpose(x, 0, 1, 2, 4, 3)


def _by_number(
    b: Builder, d: DeltaSpec, matrices: ir.Value, inputs: DeltaInputs, ends: ir.Value, each: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Results of one token of each conversation or of several, and the matrices [conversations, ends, heads, ...].

    Engines copy what a branch takes and gives, and to move the matrices is most of a token's work here. So the branch
    of one token gets their products with its key and query, and gives a factor and the parts of what is added:
    S' = exp(g) S + k written. That of several gives the new matrices, with the factors 0 and 1.
    """
    key_and_query = [b.slice(x, 0, 1, 2) for x in (inputs.k, inputs.q)]
    products = b.op("MatMul", b.op("Concat", *key_and_query, axis=2), matrices)

    def several() -> tuple[ir.Value, ...]:
        output, new = _many(b, d, matrices, inputs, ends, each)
        none, one = (b.op("Identity", b.constant(np.full((1,) * 5, factor, np.float32))) for factor in (0, 1))
        return output, none, new, one

    single = b.op("Squeeze", b.op("Equal", each, b.constant([1])))
    output, factor, column, right = b.choose(single, lambda: _one(b, products, inputs), several)
    before = b.op("Mul", b.unsqueeze(matrices, 1), factor)
    return output, b.op("Add", before, b.op("Mul", column, right))


def _one(b: Builder, asked: ir.Value, inputs: DeltaInputs) -> tuple[ir.Value, ...]:
    """Of one token of each conversation the results, and what makes new matrices of the old.

    `asked`: the products of its key and query with the matrices, [conversations, heads, 2, value size].
    """
    decay = b.op("Exp", inputs.decay)
    by_key, by_query = b.ops("Split", b.op("Mul", asked, decay), b.constant([1, 1]), outputs=2, axis=2)
    written = b.op("Mul", b.op("Sub", inputs.v, by_key), inputs.beta)
    cosine = b.sum(b.op("Mul", inputs.q, inputs.k), -1, keepdims=True)
    output = b.op("Add", by_query, b.op("Mul", cosine, written))  # q S' = exp(g) q S + (q k) written
    added = (decay, b.transpose(inputs.k, 0, 1, 3, 2), written)
    return output, *(b.unsqueeze(x, 1) for x in added)


def _many(
    b: Builder, d: DeltaSpec, matrices: ir.Value, inputs: DeltaInputs, ends: ir.Value, each: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The same of any number of tokens."""
    size = b.op("Min", each, b.constant([CHUNK]))  # of a chunk
    inputs = DeltaInputs(*_in_chunks(b, inputs, (d.key_dim, d.key_dim, d.value_dim, 1, 1), size))
    passed = b.op("CumSum", inputs.decay, b.constant(3))
    system = _solve(b, inputs, passed, size, CHUNK)
    last = b.slice(passed, -1, END, 3)
    weighted = _turned(b, b.op("Mul", inputs.k, b.op("Exp", b.op("Sub", last, passed))))

    def step(before: ir.Value, *parts: ir.Value) -> tuple[ir.Value, ...]:
        *system, weighted, decayed = parts
        out, written = _read(b, before, system)
        after = b.op("Add", b.op("Mul", before, decayed), b.op("MatMul", weighted, written))
        return after, out, written, b.op("Identity", before)

    _, out, written, begins = b.scan(step, matrices, (*system, weighted, b.op("Exp", last)))
    chunk = b.op("Div", ends, size)
    place = b.op("Mod", ends, size)
    of_ends = _Chunks(*(b.op("Gather", part, chunk, axis=0) for part in (inputs.k, passed, written, begins)))
    at_ends = _at_ends(b, of_ends, place, size)
    # [chunks, conversations, heads, tokens of a chunk, width] in order again, without what was padded
    shape = b.op(
        "Concat", b.op("Shape", inputs.v, start=1, end=3), b.constant([-1]), b.op("Shape", inputs.v, start=4), axis=0
    )
    out = b.op("Reshape", b.transpose(out, 1, 2, 0, 3, 4), shape)
    return b.slice(out, 0, each, 2), at_ends


def _at_once(
    b: Builder, matrices: ir.Value, inputs: DeltaInputs, ends: ir.Value, each: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The same of up to `DELTA_RUN` tokens, one chunk: a loop's parts and its outcome are there once."""
    matrices, *parts = (b.unsqueeze(x, 0) for x in (matrices, *inputs))
    inputs = DeltaInputs(*parts)
    # TensorRT's CumSum may loop
    passed = b.op("MatMul", _square(b, np.tri(DELTA_RUN, dtype=np.float32), each), inputs.decay)
    out, written = _read(b, matrices, _solve(b, inputs, passed, each, DELTA_RUN))
    return b.squeeze(out, 0), _at_ends(b, _Chunks(inputs.k, passed, written, matrices), ends, each)


def _solve(b: Builder, inputs: DeltaInputs, passed: ir.Value, size: ir.Value, most: int) -> tuple[ir.Value, ...]:
    """The inputs of `_read` for chunks of `size` tokens, `most` at most; `passed` is the decay since a chunk's begin.

    Decays are logarithms.
    """
    q, k, v, beta, _ = inputs
    keys = _turned(b, k)
    lower = b.cast(_square(b, np.tri(most, dtype=np.float32), size), ir.DataType.BOOL)
    between = b.op("Sub", passed, _turned(b, passed))
    between = b.op("Exp", b.op("Where", lower, between, b.constant(NEVER)))  # of token j's until token i, i >= j
    scaled = b.op("Mul", k, beta)
    inverse = _inverse(b, b.op("Mul", b.op("MatMul", scaled, keys), between), size, most)
    since = b.op("Exp", passed)
    values = b.op("MatMul", inverse, b.op("Mul", v, beta))
    reads = b.op("MatMul", inverse, b.op("Mul", scaled, since))
    return values, reads, b.op("Mul", q, since), b.op("Mul", b.op("MatMul", q, keys), between)


def _read(b: Builder, before: ir.Value, system: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Results of a chunk's tokens and the values that they write, from the matrices `before` it."""
    values, reads, asks, within = system
    written = b.op("Sub", values, b.op("MatMul", reads, before))
    return b.op("Add", b.op("MatMul", asks, before), b.op("MatMul", within, written)), written


class _Chunks(NamedTuple):
    """Keys, decays since a chunk's begin, and values that are written, [chunks, ..., tokens of a chunk, width].

    `begins` are the matrices before each chunk.
    """

    k: ir.Value
    passed: ir.Value
    written: ir.Value
    begins: ir.Value


def _at_ends(b: Builder, chunks: _Chunks, place: ir.Value, size: ir.Value) -> ir.Value:
    """The matrices [conversations, ends, heads, ...] after the token `place` [ends] of each end's chunk of `size`."""
    k, passed, written, begins = chunks
    order = b.numbers(size)
    place = b.unsqueeze(place, 1)
    until_end, at_end = (  # [ends, 1, 1, tokens of a chunk, 1]
        b.unsqueeze(b.op(compare, order, place), 1, 2, 4) for compare in ("LessOrEqual", "Equal")
    )
    until = b.sum(b.op("Where", at_end, passed, b.single(0)), 3, keepdims=True)
    weights = b.op("Exp", b.op("Where", until_end, b.op("Sub", until, passed), b.constant(NEVER)))
    added = b.op("MatMul", _turned(b, b.op("Mul", k, weights)), written)
    at_ends = b.op("Add", b.op("Mul", begins, b.op("Exp", until)), added)
    return b.transpose(at_ends, 1, 0, 2, 3, 4)


def _in_chunks(b: Builder, parts: Sequence[ir.Value], widths: Sequence[int], size: ir.Value) -> Sequence[ir.Value]:
    """Parts [conversations, heads, tokens, width] as [chunks, conversations, heads, tokens of a chunk, width].

    The last chunk is filled up with zeros: tokens that change nothing and are not read.
    """
    joined = b.op("Concat", *parts, axis=-1)
    missing = b.op("Mod", b.op("Neg", b.size(joined, 2)), size)
    pads = b.op("Concat", b.constant([0] * 6), missing, b.constant([0]), axis=0)
    shape = (b.op("Shape", joined, start=0, end=2), b.constant([-1]), size, b.constant([sum(widths)]))
    chunks = b.op("Reshape", b.op("Pad", joined, pads), b.op("Concat", *shape, axis=0))
    chunks = b.transpose(chunks, 2, 0, 1, 3, 4)
    return b.ops("Split", chunks, b.constant([*widths]), outputs=len(widths), axis=-1)


def _inverse(b: Builder, system: ir.Value, size: ir.Value, most: int) -> ir.Value:
    """The inverse of 1 + the strictly lower part of [..., size, size]; `most`, a power of two, is the largest size.

    Blocks of one row are their own inverses. Those of twice as many have the inverses of both halves, X, and beneath
    the diagonal - X system X; every step does all of them, and computes with no number larger than the inverse has.
    """
    inverse = _square(b, np.eye(most, dtype=np.float32), size)
    rows = np.arange(most)
    for block in 1 << np.arange(most.bit_length() - 1):
        pair = rows // (2 * block)
        half = rows // block % 2
        beneath = (pair[:, None] == pair) & (half[:, None] > half)
        part = b.op("Mul", system, _square(b, beneath.astype(np.float32), size))
        if block > 1:
            part = b.op("MatMul", b.op("MatMul", inverse, part), inverse)
        inverse = b.op("Sub", inverse, part)
    return inverse


def _square(b: Builder, table: NDArray[np.float32], size: ir.Value) -> ir.Value:
    """The first `size` rows and columns of a constant."""
    return b.op("Slice", b.constant(table), b.constant([0, 0]), b.op("Concat", size, size, axis=0))
