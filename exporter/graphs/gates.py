"""DyVTE's gates: reading and checking their weights, and the tiny graph that evaluates one.

A gate file is safetensors with `gate.{layer}.fc1.weight` [width, 2 * hidden] and `gate.{layer}.fc2.weight`
[2, width]; `layer` is the 0-based index of the decoder layer whose output is read, so it decides for
K = layer + 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.loader import check_finite
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits, read_header, read_tensor, shown
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import CheckpointError
from vtx.tools.calibration.report import other_downsampling

FEATURES = "mean of the rows after the last image but the last one, and the last one"
MAX_WIDTH = 1 << 16
MAX_METADATA = 1 << 16
_NAME = re.compile(r"gate\.(0|[1-9]\d{0,3})\.fc([12])\.weight")


@dataclass(frozen=True, slots=True)
class Gates:
    """Gates by the K they decide for: (fc1 [width, 2 * hidden], fc2 [2, width]) float32; `warnings` for the user."""

    by_k: Mapping[int, tuple[NDArray[np.float32], NDArray[np.float32]]]
    metadata: Mapping[str, str]
    warnings: tuple[str, ...]


def read_gates(path: Path, text: TextConfig, fingerprint: str) -> Gates:
    """Read and check a gate file for a model. A gate on the last layer is ignored, as nothing is withdrawn there."""
    header = read_header(path)
    pairs: dict[int, dict[str, TensorInfo]] = {}
    for name, info in header.tensors.items():
        match = _NAME.fullmatch(name)
        if not match:
            raise CheckpointError(
                f"{path.name}: {name!r} is not a gate's weight; the names are gate.N.fc1.weight and gate.N.fc2.weight"
            )
        pairs.setdefault(int(match[1]), {})[match[2]] = info
    metadata = header.metadata
    size = sum(len(key) + len(value) for key, value in metadata.items())
    if size > MAX_METADATA:
        raise CheckpointError(
            f"{path.name}: {size:,} characters of metadata, the limit is {MAX_METADATA:,}; remove some"
        )
    if metadata.get("features", FEATURES) != FEATURES:
        raise CheckpointError(
            f"{path.name}: the gates read {shown(metadata['features'])}, this version gives them the {FEATURES}; "
            "train gates with vtx-train-gate"
        )
    trained_for = metadata.get("model_fingerprint")
    if trained_for is not None and (modes := other_downsampling(trained_for, fingerprint)):
        raise CheckpointError(
            f"{path.name}: the gates were trained with --downsample {shown(modes[0][:12])}, this is {modes[1]}; train "
            "gates for a bundle of this one with vtx-train-gate --bundle"
        )
    if trained_for is not None and trained_for != fingerprint:
        raise CheckpointError(
            f"{path.name}: the gates were trained for another model ({shown(trained_for[:12])}, this is "
            f"{fingerprint[:12]}); train gates for this one with vtx-train-gate"
        )
    warning = f"{path.name} does not name the model its gates were trained for; their shapes fit this one"
    gates = {layer: _gate(path, layer, pair, text) for layer, pair in sorted(pairs.items())}
    by_k = {layer + 2: gate for layer, gate in gates.items() if layer + 1 < text.layers}
    if not by_k:
        raise CheckpointError(f"{path.name}: no gate on a layer before the last; train gates with vtx-train-gate")
    return Gates(by_k, metadata, () if trained_for else (warning,))


def _gate(
    path: Path, layer: int, pair: Mapping[str, TensorInfo], text: TextConfig
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if layer >= text.layers:
        raise CheckpointError(f"{path.name}: gate {layer} is beyond the {text.layers} layers of this model")
    if set(pair) != {"1", "2"}:
        raise CheckpointError(f"{path.name}: gate {layer} lacks fc{'2' if '1' in pair else '1'}.weight")
    shapes = pair["1"].shape, pair["2"].shape
    width = shapes[1][1] if len(shapes[1]) == 2 else 0
    if not 1 <= width <= MAX_WIDTH or shapes != ((width, 2 * text.hidden), (2, width)):
        raise CheckpointError(
            f"{path.name}: gate {layer} has weights {list(shapes[0])} and {list(shapes[1])}; this model of hidden "
            f"size {text.hidden} needs [width, {2 * text.hidden}] and [2, width]"
        )
    weights = []
    for info in (pair["1"], pair["2"]):
        if info.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(f"{path.name}: {info.name} is {info.dtype}; it must be F32, F16 or BF16")
        check_finite(read_bits(info), info.name)
        weights.append(read_tensor(info).astype(np.float32, copy=False))
    return weights[0], weights[1]


def gate_tensors(k: int) -> tuple[str, str]:
    """Names of the two weights of the gate before layer `k`, in a gate file and in a bundle."""
    return f"gate.{k - 2}.fc1.weight", f"gate.{k - 2}.fc2.weight"


def build_gate(b: Builder, c: TextConfig, k: int) -> None:
    """softmax(fc2(gelu(fc1([mean; last])))) of a question's hidden states [tokens, hidden]: odds [2].

    The mean is over all tokens but the last; a question of one token has a mean of zeros. Float32 in every dialect.
    """
    hidden = b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden])
    last = b.slice(hidden, -1, 1 << 30, 0)
    before = b.slice(hidden, 0, -1, 0)
    total = b.sum(before, 0, keepdims=True)
    count = b.op("Max", b.op("Sub", b.size(hidden, 0), b.constant([1])), b.constant([1]))
    mean = b.op("Div", total, b.cast(count, FLOAT))
    first, second = gate_tensors(k)
    x = b.op("Gemm", b.op("Concat", mean, last, axis=-1), b.weight(first, FLOAT), transB=1)
    x = b.op("Gemm", b.dialect.gelu(b, x, tanh=False), b.weight(second, FLOAT), transB=1)
    b.output(b.reshape(b.op("Softmax", x, axis=-1), 2), names.ODDS, FLOAT, [2])
