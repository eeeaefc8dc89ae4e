"""Gates of tiny models, and files of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.runtime.bundle.safetensors import write_safetensors

HIDDEN, LAYERS, WIDTH = 64, 8, 24
KS = (2, 3, 5, 8)
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]


def random_gate(seed: int) -> Pair:
    """Random weights; which questions it fires for is as good as a coin."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((WIDTH, 2 * HIDDEN)) / (2 * HIDDEN) ** 0.5
    return first.astype(np.float32), rng.standard_normal((2, WIDTH)).astype(np.float32)


def certain_gate(fires: bool) -> Pair:
    """gelu(z) + gelu(-z) is never negative, so one side always wins."""
    half = random_gate(0)[0][: WIDTH // 2]
    second = np.zeros((2, WIDTH), np.float32)
    second[int(fires)] = 0.1
    return np.concatenate([half, -half]), second


def write_gates(path: Path, pairs: Mapping[int, Pair], metadata: Mapping[str, str] | None = None) -> Path:
    """A file of gates; `pairs` by the K that they decide for."""
    names = {f"gate.{k - 2}.fc{n + 1}.weight": w for k, pair in pairs.items() for n, w in enumerate(pair)}
    write_safetensors(path, names, metadata)
    return path


def plan_with_gates(checkpoint: Path, gates: Path, ks: Any = KS) -> Plan:
    return plan_export(ExportOptions(str(checkpoint), ks, "fp32", gates=gates))
