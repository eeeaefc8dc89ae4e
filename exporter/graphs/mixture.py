"""Experts in the graph: each engine's own form of them, by which a token reads no weights but those of its experts.

onnxruntime's CPU provider has an operator for experts, whose first matrix has the rows of gate and up by turns.
OpenVINO finds the products of all experts with all tokens that `_tiled` writes, and computes those that are chosen.
"""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.builder import MICROSOFT, Builder
from vtx.exporter.graphs.dialects.ort import read_blocks, unsigned_parts
from vtx.runtime.bundle.spec.stored import EXPERTS, INT8_ACTIVATIONS
from vtx.tools.model.mixture import Mixture

BUILT = ("ort", "plain")  # dialects that have a form of experts


def mix_experts(b: Builder, c: TextConfig, m: Mixture, x: ir.Value, name: str) -> ir.Value:
    """The feed-forward `name` of hidden states [tokens, hidden]."""
    logits = b.linear(x, f"{name}.gate", bias=False)
    form = _by_operator if b.dialect.name == "ort" else _tiled
    mixed = form(b, c, m, x, logits, f"{name}{EXPERTS}")
    if not m.shared:
        return mixed
    gate = b.op("Sigmoid", b.linear(x, f"{name}.shared_expert_gate", bias=False))
    return b.op("Add", mixed, b.op("Mul", gate, gated_mlp(b, x, f"{name}.shared_expert", c.activation)))


def _by_operator(b: Builder, c: TextConfig, m: Mixture, x: ir.Value, logits: ir.Value, name: str) -> ir.Value:
    """MoE or QMoE of onnxruntime. They take the softmax of logits and choose themselves."""
    attributes = {
        "k": m.active,
        "normalize_routing_weights": 1,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }
    gate, up, down = (f"{name}{part}_proj.weight" for part in ("gate", "up", "down"))
    if any(b.location(matrix).scales is None for matrix in (gate, up, down)):
        first = _by_turns(b, m, _matrix(b, gate), _matrix(b, up))
        second = b.reshape(_matrix(b, down), m.count, c.hidden, m.ffn)
        return b.op("MoE", x, logits, first, None, second, domain=MICROSOFT, **attributes)
    bits = read_blocks(b, gate)[0]
    block = min(read_blocks(b, matrix)[1] for matrix in (gate, down))
    of_gate, of_up, of_down = (unsigned_parts(b, matrix, block) for matrix in (gate, up, down))
    first_of = [_by_turns(b, m, *pair) for pair in zip(of_gate, of_up, strict=True)]
    second_of = [b.reshape(part, m.count, c.hidden, -1) for part in of_down]
    inputs = [x, logits, *first_of[:2], None, *second_of[:2]]
    if len(of_gate) > 2:  # zero points follow a bias, and a third matrix with its scales and bias
        inputs += [None] * 4 + [first_of[2], second_of[2]]
    return b.op(
        "QMoE",
        *inputs,
        domain=MICROSOFT,
        expert_weight_bits=bits,
        block_size=block,
        accuracy_level=INT8_ACTIVATIONS,
        weights_prepacked=0,
        **attributes,
    )


def _by_turns(b: Builder, m: Mixture, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Rows [count * ffn, width] of two matrices as [count, 2 * ffn, width], one of each in turn."""
    apart = [b.reshape(part, m.count, m.ffn, 1, -1) for part in (gate, up)]
    return b.reshape(b.op("Concat", *apart, axis=2), m.count, 2 * m.ffn, -1)


def _matrix(b: Builder, name: str) -> ir.Value:
    return b.weight(name) if b.location(name).scales is None else b.dequantised(name)


def _tiled(b: Builder, c: TextConfig, m: Mixture, x: ir.Value, logits: ir.Value, name: str) -> ir.Value:
    """All experts' products with all tokens, in the shares of those that are chosen, 0 of all others."""
    best, chosen = b.ops("TopK", logits, b.constant([m.active]), outputs=2, axis=-1)
    largest = b.slice(best, 0, 1, 1)
    weights = b.op("Exp", b.op("Sub", best, largest))  # no Softmax, by which runtimes find attention
    shares = b.op("Div", weights, b.sum(weights, -1, keepdims=True))
    none = b.op("ConstantOfShape", b.op("Shape", logits))
    shares = b.op("ScatterElements", none, chosen, shares, axis=1)
    every = b.op("Tile", b.reshape(x, -1, c.hidden), b.constant([m.count, 1]))
    every = b.reshape(every, m.count, -1, c.hidden)
    gate = activate(b, b.op("MatMul", every, _stack(b, m, f"{name}gate_proj.weight")), c.activation)
    up = b.op("MatMul", every, _stack(b, m, f"{name}up_proj.weight"))
    outputs = b.op("MatMul", b.op("Mul", gate, up), _stack(b, m, f"{name}down_proj.weight"))
    outputs = b.reshape(outputs, m.count, 1, -1, c.hidden)
    shares = b.reshape(b.transpose(shares, 1, 0), m.count, 1, -1)
    products = b.op("Mul", outputs, b.unsqueeze(shares, -1))
    return b.reshape(b.sum(products, 0), -1, c.hidden)


def _stack(b: Builder, m: Mixture, name: str) -> ir.Value:
    """The experts' matrices, each transposed: [count, in, out]."""
    return b.transpose(b.stack(name, m.count), 0, 2, 1)
