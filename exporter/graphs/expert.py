"""One step of an expert that makes actions: their change, from a state, the actions so far and the time.

Its rows are the state, then the actions. In each layer they attend to the K and V of the prompt in the decoder's layer
of that number, and to each other; only the state's row does not see the actions. Operators are those that every dialect
has.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.builder import FLOAT, Builder, Shape
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.action_spec import ActionSpec
from vtx.tools.estimate.sizes import ActionSize
from vtx.tools.model.tensors import Shapes, linear_tensors

MASKED = -65504.0  # a masked product, 0 after the softmax; float16 holds it
END = 1 << 30


def expert_tensors(c: TextConfig, a: ActionSpec) -> Shapes:
    """Canonical names and shapes of all weights of the expert."""
    for name, out, into in (
        ("state_proj", a.hidden, a.state),
        ("action_in_proj", a.hidden, a.width),
        ("action_time_mlp_in", a.hidden, 2 * a.hidden),
        ("action_time_mlp_out", a.hidden, a.hidden),
        ("action_out_proj", a.width, a.hidden),
    ):
        yield from linear_tensors(f"head.{name}", out, into)
    expert = ActionSize.of(a).beside(c)
    for layer in expert.every:
        for name, shape in expert.layer_tensors(layer):
            yield name.replace("text.", "head.", 1), shape
    yield "head.norm.weight", (a.hidden,)


def time_rates(a: ActionSpec) -> NDArray[np.float32]:
    """The angles [hidden / 2] of time 1, turns of periods that grow by equal factors.

    They reach 1571, where float32 has steps of 1e-4: so by PyTorch, in the order of transformers.
    """
    import torch

    periods = a.min_period * (a.max_period / a.min_period) ** torch.linspace(0, 1, a.hidden // 2)
    rates: NDArray[np.float32] = (1.0 / periods * 2 * math.pi).numpy()
    return rates


def build_expert(b: Builder, c: TextConfig, a: ActionSpec) -> None:
    """The change of the actions [horizon, width] at a time, by the prompt's K and V of each layer, which may differ in
    their numbers of slots.
    """
    rows = a.horizon + 1
    state = b.from_float32(b.input(names.ROBOT_STATE, FLOAT, [1, a.state]))
    actions = b.from_float32(b.input(names.ACTIONS, FLOAT, [a.horizon, a.width]))
    angles = b.op("Mul", b.input(names.TIME, FLOAT, [1, 1]), b.constant(time_rates(a)[None]))
    time = b.from_float32(b.op("Concat", b.op("Sin", angles), b.op("Cos", angles), axis=1))
    moment = b.op("Expand", time, b.constant([a.horizon, a.hidden]))
    y = b.op("Concat", b.linear(actions, "head.action_in_proj", bias=True), moment, axis=1)
    y = activate(b, b.linear(y, "head.action_time_mlp_in", bias=True), "silu")
    projected = b.linear(y, "head.action_time_mlp_out", bias=True)
    x = b.op("Concat", b.linear(state, "head.state_proj", bias=True), projected, axis=0)

    positions = b.input(names.POSITIONS, ir.DataType.INT64, [rows])
    tables = [
        b.from_float32(b.op("Gather", b.input(name, FLOAT, ["max_context", c.head_dim // 2]), positions))
        for name in (names.COS, names.SIN)
    ]
    cos, sin = (b.op("Concat", table, table, axis=1) for table in tables)  # [rows, head_dim]
    hidden_from = b.constant(np.array([[a.horizon], *[[0]] * a.horizon], np.int64))  # of the last slots, by row
    for layer in range(1, c.layers + 1):
        p = f"head.layers.{layer - 1}"
        y = b.dialect.norm(b, x, f"{p}.input_layernorm.weight", a.eps)
        q, k, v = (
            b.op(
                "Transpose",
                b.reshape(b.linear(y, f"{p}.self_attn.{part}_proj", bias=False), rows, heads, c.head_dim),
                perm=[1, 0, 2],
            )
            for part, heads in (("q", a.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )  # [heads, rows, head_dim]
        q, k = (_rotated(b, part, cos, sin, c.head_dim) for part in (q, k))
        shape: Shape = [c.kv_heads, f"slots.{layer}", c.head_dim]
        past = [b.from_float32(b.input(name(layer), FLOAT, shape)) for name in (names.past_key, names.past_value)]
        keys, values = (b.op("Concat", old, new, axis=1) for old, new in zip(past, (k, v), strict=True))
        slots = b.op("Shape", keys, start=1, end=2)
        every = b.op("Range", b.constant(np.array(0)), b.op("Squeeze", slots), b.constant(np.array(1)))
        visible = b.op("Less", every, b.op("Sub", slots, hidden_from))  # [rows, slots]
        mask = b.op("Where", visible, b.scalar(0), b.scalar(MASKED))
        shared = b.reshape(b.op("Mul", q, b.scalar(c.head_dim**-0.5)), c.kv_heads, -1, c.head_dim)
        products = b.op("MatMul", shared, b.op("Transpose", keys, perm=[0, 2, 1]))
        products = b.op("Reshape", products, b.op("Concat", b.constant([a.heads, rows]), slots, axis=0))
        weights = b.op("Softmax", b.op("Add", products, mask), axis=-1)
        weights = b.op("Reshape", weights, b.op("Concat", b.constant([c.kv_heads, -1]), slots, axis=0))
        attended = b.reshape(b.op("MatMul", weights, values), a.heads, rows, c.head_dim)
        attended = b.reshape(b.op("Transpose", attended, perm=[1, 0, 2]), rows, a.heads * c.head_dim)
        x = b.op("Add", x, b.linear(attended, f"{p}.self_attn.o_proj", bias=False))
        y = b.dialect.norm(b, x, f"{p}.post_attention_layernorm.weight", a.eps)
        x = b.op("Add", x, gated_mlp(b, y, f"{p}.mlp", a.activation))
    of_actions = b.op("Slice", x, b.constant([1]), b.constant([END]), b.constant([0]))
    y = b.dialect.norm(b, of_actions, "head.norm.weight", a.eps)
    change = b.to_float32(b.linear(y, "head.action_out_proj", bias=True))
    b.output(change, names.CHANGE, FLOAT, [a.horizon, a.width])


def _rotated(b: Builder, x: ir.Value, cos: ir.Value, sin: ir.Value, width: int) -> ir.Value:
    first = b.op("Slice", x, b.constant([0]), b.constant([width // 2]), b.constant([2]))
    second = b.op("Slice", x, b.constant([width // 2]), b.constant([END]), b.constant([2]))
    turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
    return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))
