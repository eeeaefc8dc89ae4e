"""One step of an expert that makes actions: their change, from a state, the actions so far and the time.

Its rows are the actions, of pi0 behind the state, which does not see them. In each layer they attend to the K and V of
the prompt in the decoder's layer of that number, and to each other; in some of SmolVLA's layers only to projections of
these K and V. Operators are those that every dialect has.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.builder import FLOAT, INT64, Builder, Shape
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.action_spec import ActionSpec
from vtx.tools.estimate.sizes import ActionSize
from vtx.tools.model.tensors import Shapes, linear_tensors

MASKED = -65504.0  # a masked product, 0 after the softmax; float16 holds it
END = 1 << 30
STATE_PROJECTION = "head.state_proj"  # a weight that no graph reads if the state is a token of the prompt


def expert_tensors(c: TextConfig, a: ActionSpec) -> Shapes:
    """Canonical names and shapes of all weights of the expert."""
    for name, out, into in (
        *((("state_proj", a.hidden, a.state),) if a.state_in == "expert" else ()),
        *((("state_proj", c.hidden, a.state),) if a.state_in == "prompt" else ()),
        ("action_in_proj", a.hidden, a.width),
        ("action_time_mlp_in", a.hidden, a.hidden if a.adaptive else 2 * a.hidden),
        ("action_time_mlp_out", a.hidden, a.hidden),
        ("action_out_proj", a.width, a.hidden),
    ):
        yield from linear_tensors(f"head.{name}", out, into)
    yield from ActionSize.of(a).tensors(c)


def sees_itself(a: ActionSpec, layer: int) -> bool:
    """Return True if the expert's tokens attend to each other in a layer, counted from 1."""
    return (layer - 1) % a.self_every == 0


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
    actions = b.from_float32(b.input(names.ACTIONS, FLOAT, [a.horizon, a.width]))
    angles = b.op("Mul", b.input(names.TIME, FLOAT, [1, 1]), b.constant(time_rates(a)[None]))
    time = b.from_float32(b.op("Concat", b.op("Sin", angles), b.op("Cos", angles), axis=1))
    x = b.linear(actions, "head.action_in_proj", bias=True)
    if a.adaptive:
        moment = activate(b, _mixed(b, time), "silu")
    else:
        beside = b.op("Expand", time, b.constant([a.horizon, a.hidden]))
        x = _mixed(b, b.op("Concat", x, beside, axis=1))
        moment = None
    if a.state_in == "expert":
        state = b.from_float32(b.input(names.ROBOT_STATE, FLOAT, [1, a.state]))
        x = b.op("Concat", b.linear(state, STATE_PROJECTION, bias=True), x, axis=0)
    expert = _Expert(b, c, a, moment)
    for layer in range(1, c.layers + 1):
        p = f"head.layers.{layer - 1}"
        y, gate = expert.normed(x, f"{p}.input_layernorm")
        x = b.op("Add", x, _gated(b, expert.attended(y, layer), gate, a.hidden))
        y, gate = expert.normed(x, f"{p}.post_attention_layernorm")
        x = b.op("Add", x, _gated(b, gated_mlp(b, y, f"{p}.mlp", a.activation), gate, a.hidden))
    if a.state_in == "expert":
        x = b.slice(x, 1, END, 0)
    y, _ = expert.normed(x, "head.norm")
    change = b.to_float32(b.linear(y, "head.action_out_proj", bias=True))
    b.output(change, names.CHANGE, FLOAT, [a.horizon, a.width])


def _mixed(b: Builder, x: ir.Value) -> ir.Value:
    """The mixed time that enters the expert, with the actions beside it or alone."""
    inner = activate(b, b.linear(x, "head.action_time_mlp_in", bias=True), "silu")
    return b.linear(inner, "head.action_time_mlp_out", bias=True)


def _gated(b: Builder, x: ir.Value, gate: ir.Value | None, width: int) -> ir.Value:
    """Rows [rows, width] times a gate [1, width], in three dimensions: OpenVINO 2026.4 fuses a product of two into the
    matrix before it, and crashes.
    """
    if gate is None:
        return x
    return b.reshape(b.op("Mul", b.reshape(x, 1, -1, width), gate), -1, width)


class _Expert:
    """The parts of a layer; `moment` [1, hidden] is the time that enters by the norms, None if it does not."""

    def __init__(self, b: Builder, c: TextConfig, a: ActionSpec, moment: ir.Value | None) -> None:
        self._b = b
        self._c = c
        self._a = a
        self._moment = moment
        positions = b.input(names.POSITIONS, INT64, [a.rows])
        tables = [b.input(name, FLOAT, ["max_context", c.head_dim // 2]) for name in (names.COS, names.SIN)]
        self._turn = self._waves(tables, positions)
        crosses = a.self_every > 1  # there the first action is at position 0
        self._turn_from_0 = self._waves(tables, b.constant(np.arange(a.rows))) if crosses else self._turn
        # of the last slots, the number that each row does not see
        state = a.state_in == "expert"
        hidden = np.arange(a.rows)[::-1] if a.causal else np.array([a.horizon] * state + [0] * a.horizon)
        self._hidden = b.constant(hidden.astype(np.int64)[:, None])

    def _waves(self, tables: list[ir.Value], positions: ir.Value) -> list[ir.Value]:
        """Cosines and sines [rows, head_dim] at positions [rows]."""
        b = self._b
        rows = [b.from_float32(b.op("Gather", table, positions)) for table in tables]
        return [b.op("Concat", part, part, axis=1) for part in rows]

    def normed(self, x: ir.Value, name: str) -> tuple[ir.Value, ir.Value | None]:
        """The normed rows, and the factor of what is added to `x` then, if time decides it."""
        b = self._b
        if self._moment is None:
            return b.dialect.norm(b, x, f"{name}.weight", self._a.eps), None
        modulation = b.linear(self._moment, f"{name}.dense", bias=True)
        width = self._a.hidden
        y = b.dialect.norm(b, x, width, self._a.eps)
        scale, shift, gate = (b.slice(modulation, part * width, (part + 1) * width, 1) for part in range(3))
        return b.op("Add", b.op("Mul", y, b.op("Add", scale, b.scalar(1))), shift), gate

    def attended(self, y: ir.Value, layer: int) -> ir.Value:
        """The sum that attention adds in a layer to rows that are normed."""
        b = self._b
        c = self._c
        a = self._a
        p = f"head.layers.{layer - 1}.self_attn"
        shape: Shape = [c.kv_heads, f"slots.{layer}", c.head_dim]
        keys, values = (
            b.from_float32(b.input(name(layer), FLOAT, shape)) for name in (names.past_key, names.past_value)
        )
        q = self._heads(b.linear(y, f"{p}.q_proj", bias=False), a.heads)
        hidden = self._hidden
        if sees_itself(a, layer):
            q = self._rotated(q, self._turn)
            k = self._rotated(self._heads(b.linear(y, f"{p}.k_proj", bias=False), c.kv_heads), self._turn)
            v = self._heads(b.linear(y, f"{p}.v_proj", bias=False), c.kv_heads)
            keys = b.op("Concat", keys, k, axis=1)
            values = b.op("Concat", values, v, axis=1)
        else:
            hidden = b.constant(np.zeros((a.rows, 1), np.int64))
            q = self._rotated(q, self._turn_from_0)
            keys, values = (
                self._heads(b.linear(self._flat(part), f"{p}.{name}_proj", bias=False), c.kv_heads)
                for part, name in ((keys, "k"), (values, "v"))
            )
        slots = b.size(keys, 1)
        every = b.numbers(slots)
        visible = b.op("Less", every, b.op("Sub", slots, hidden))  # [rows, slots]
        mask = b.op("Where", visible, b.scalar(0), b.scalar(MASKED))
        shared = b.reshape(b.op("Mul", q, b.scalar(c.head_dim**-0.5)), c.kv_heads, -1, c.head_dim)
        products = b.op("MatMul", shared, b.transpose(keys, 0, 2, 1))
        products = b.op("Reshape", products, b.op("Concat", b.constant([a.heads, a.rows]), slots, axis=0))
        weights = b.op("Softmax", b.op("Add", products, mask), axis=-1)
        weights = b.op("Reshape", weights, b.op("Concat", b.constant([c.kv_heads, -1]), slots, axis=0))
        attended = b.reshape(b.op("MatMul", weights, values), a.heads, a.rows, c.head_dim)
        attended = b.reshape(b.transpose(attended, 1, 0, 2), a.rows, a.heads * c.head_dim)
        return b.linear(attended, f"{p}.o_proj", bias=False)

    def _heads(self, x: ir.Value, heads: int) -> ir.Value:
        """Rows [rows, heads * head_dim] as [heads, rows, head_dim]."""
        split = self._b.reshape(x, -1, heads, self._c.head_dim)
        return self._b.transpose(split, 1, 0, 2)

    def _flat(self, x: ir.Value) -> ir.Value:
        """[kv_heads, slots, head_dim] as [slots, kv_heads * head_dim]."""
        turned = self._b.transpose(x, 1, 0, 2)
        return self._b.reshape(turned, -1, self._c.kv_heads * self._c.head_dim)

    def _rotated(self, x: ir.Value, waves: list[ir.Value]) -> ir.Value:
        b = self._b
        cos, sin = waves
        middle = self._c.head_dim // 2
        first = b.slice(x, 0, middle, 2)
        second = b.slice(x, middle, END, 2)
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
        return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))
