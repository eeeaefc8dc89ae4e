"""A bundle whose stages read inputs per token in addition to hidden states, made of exported graphs.

No family has one that the embedding gives. A stage adds to its hidden states `map`, which the vision graph gives of
image tokens, and `bias`, which the embed graph gives of every id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.support.bundles import export
from vtx.runtime.bundle.bundle import Bundle, seal_manifest, sha256
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import FileRecord, TokenInput

HIDDEN, KS = 64, (3, 5, 8)
MAP, BIAS = "map", "bias"
READS = {0: (BIAS,), 1: (MAP,), 2: (MAP, BIAS)}  # by stage


def export_with_token_inputs(checkpoint: Path, made: Path) -> None:
    """Export a bundle of two dialects, and give its graphs two token inputs."""
    export(checkpoint, made, KS, dialects=("ort", "plain"), reductions=("fastv:k=2",))
    manifest = Bundle.open(made).manifest
    for graphs in manifest.dialects.values():
        changed(made / graphs.embed, give(names.HIDDEN, BIAS, 0.5))
        changed(made / graphs.vision, give(names.FEATURES, MAP, -2.0))
        for number, which in READS.items():
            changed(made / graphs.stages[number], read(*which))
    stages = tuple(replace(stage, inputs=READS.get(number, ())) for number, stage in enumerate(manifest.stages))
    inputs = TokenInput(MAP, HIDDEN, of_text=False, of_images=True), TokenInput(BIAS, HIDDEN, True, False)
    files = {
        name: FileRecord((made / name).stat().st_size, sha256(made / name)) if name.endswith(".onnx") else record
        for name, record in manifest.files.items()
    }
    seal_manifest(made, replace(manifest, stages=stages, token_inputs=inputs, files=files))


def changed(path: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


def give(source: str, name: str, scale: float) -> Callable[[onnx.GraphProto], None]:
    """The graph gives `name`: what it gives as `source`, as rows of the hidden size, times `scale`."""

    def change(graph: onnx.GraphProto) -> None:
        out = names.token_input(name)
        graph.initializer.append(helper.make_tensor(f"{out}.scale", TensorProto.FLOAT, [], [scale]))
        graph.initializer.append(helper.make_tensor(f"{out}.rows", TensorProto.INT64, [2], [-1, HIDDEN]))
        graph.node.append(helper.make_node("Reshape", [source, f"{out}.rows"], [f"{out}.flat"]))
        graph.node.append(helper.make_node("Mul", [f"{out}.flat", f"{out}.scale"], [out]))
        graph.output.append(helper.make_tensor_value_info(out, TensorProto.FLOAT, ["tokens", HIDDEN]))

    return change


def read(*read_names: str) -> Callable[[onnx.GraphProto], None]:
    """The stage adds these inputs to the hidden states that it begins with."""

    def change(graph: onnx.GraphProto) -> None:
        total = names.HIDDEN
        for name in read_names:
            graph_input = names.token_input(name)
            graph.input.append(helper.make_tensor_value_info(graph_input, TensorProto.FLOAT, ["tokens", HIDDEN]))
            graph.node.insert(0, helper.make_node("Add", [total, graph_input], [f"{graph_input}.sum"]))
            total = f"{graph_input}.sum"
        added = [node for node in graph.node if node.output[0].endswith(".sum") and names.TOKEN_INPUT in node.output[0]]
        for node in added:
            graph.node.remove(node)
        for node in graph.node:
            for number, each in enumerate(node.input):
                if each == names.HIDDEN:
                    node.input[number] = total
        for node in added:  # the last was inserted first
            graph.node.insert(0, node)

    return change
