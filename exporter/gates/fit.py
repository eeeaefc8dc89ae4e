"""Fitting the gates to the measurements: every gate sees every item; one is in memory at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.gates.workdir import WorkDirectory
from vtx.exporter.graphs.gates import FEATURES, gate_tensors
from vtx.exporter.training import learning_rate_factor
from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors
from vtx.runtime.errors import RequestError, VtxError
from vtx.tools.calibration.gates import HeldOut
from vtx.tools.data.items import image_key

MIN_AGREEMENT = 0.99
FIT_BATCH = 16
ITEMS_SEEN = 8000  # about 1% of LLaVA's instruction data, once
RECORDED = ("vtx-edge", "torch", "numpy")
GateWeights = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Settings of the fit. `alpha` bounds the cross-entropy after the exit by that of the full model (DyVTE Eq. 6).

    An infinite `alpha` bounds nothing: the answer alone decides (DyVTE Eq. 5).
    `epochs` None: enough for about 8,000 items in total, at least one.
    """

    alpha: float = 1.03
    width: int = 2048
    lr: float = 4e-5
    epochs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alpha > 0 or not 0 < self.lr < 1:
            raise RequestError(f"alpha is {self.alpha} and lr {self.lr}; alpha must be above 0, lr between 0 and 1")
        if not 1 <= self.width <= 1 << 16:
            raise RequestError(f"--width is {self.width}; it must be 1 to 65536")
        if self.epochs is not None and self.epochs < 1:
            raise RequestError(f"--epochs is {self.epochs}; it must be at least 1")
        if not 0 <= self.seed < 1 << 32:
            raise RequestError(f"--seed is {self.seed}; it must be 0 to 4294967295")

    def epochs_for(self, items: int) -> int:
        return self.epochs or max(1, ITEMS_SEEN // max(items, 1))


def labels(agreement: NDArray[np.float32], losses: NDArray[np.float32], alpha: float) -> NDArray[np.int64]:
    """DyVTE Eq. 6 [items, K]: 1 if the image tokens may leave before layer K; the last column is the full model's."""
    bounded = losses[:, :-1] < alpha * losses[:, -1:] if math.isfinite(alpha) else True
    return ((agreement[:, :-1] > MIN_AGREEMENT) & bounded).astype(np.int64)


def fit_gates(
    work: WorkDirectory, ks: tuple[int, ...], options: FitOptions, report: Callable[[int], None]
) -> dict[int, GateWeights]:
    """The gate of every K, saved in the work directory as soon as it is fitted. Calls `report(1)` after each."""
    y = labels(work.read("agreement", held_out=False), work.read("cross_entropy", held_out=False), options.alpha)
    options_key = hashlib.sha256(json.dumps([work.fingerprint, asdict(options)], sort_keys=True).encode()).hexdigest()
    gates: dict[int, GateWeights] = {}
    for column, k in enumerate(ks):
        path = work.folder / f"gate-{k - 2:03d}.safetensors"
        with suppress(VtxError, KeyError):  # of an earlier run with the same data and options
            header = read_header(path, error=RequestError)
            if header.metadata.get("fit") == options_key:
                first, second = (read_tensor(header.tensors[name], error=RequestError) for name in gate_tensors(k))
                gates[k] = first, second
        if k not in gates:
            inputs = work.read(f"inputs.{k - 2}", held_out=False)
            gates[k] = fit_gate(inputs, y[:, column], options, options.seed + k)
            write_safetensors(path, dict(zip(gate_tensors(k), gates[k], strict=True)), {"fit": options_key})
        report(1)
    return gates


def fit_gate(inputs: NDArray[np.float32], targets: NDArray[np.int64], options: FitOptions, seed: int) -> GateWeights:
    """fc1 [width, 2 * hidden] and fc2 [2, width] from inputs [items, 2 * hidden] and labels [items] (DyVTE Eq. 7)."""
    random = torch.Generator().manual_seed(seed)
    x = torch.from_numpy(inputs)
    y = torch.from_numpy(targets)
    first = _initial(options.width, x.shape[1], random)
    second = _initial(2, options.width, random)
    optimizer = torch.optim.AdamW([first, second], lr=options.lr, weight_decay=0.0, fused=True)
    epochs = options.epochs_for(len(x))
    count = len(x)
    steps = epochs * math.ceil(count / FIT_BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(count, generator=random), FIT_BATCH):
            optimizer.zero_grad()
            F.cross_entropy(gate_logits(x[batch], first, second), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return first.detach().numpy(), second.detach().numpy()


def gate_logits(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """fc2(gelu(fc1(x))) of inputs [items, 2 * hidden], before the softmax: [items, 2]."""
    return F.linear(F.gelu(F.linear(x, first)), second)


def gate_odds(inputs: NDArray[np.float32], gate: GateWeights) -> NDArray[np.float32]:
    """The probability of withdrawal [items] that a gate gives for inputs [items, 2 * hidden]."""
    with torch.inference_mode():
        logits = gate_logits(torch.from_numpy(inputs), *map(torch.from_numpy, gate))
        odds: NDArray[np.float32] = logits.softmax(-1)[:, 1].numpy()
    return odds


def _initial(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Uniform within 1 / sqrt(columns), the initialisation of a linear layer."""
    weight = torch.rand(rows, columns, generator=random).mul_(2).sub_(1).div_(math.sqrt(columns))
    return weight.requires_grad_()


def write_gates(
    path: Path, gates: dict[int, GateWeights], model_fingerprint: str, options: FitOptions, record: Mapping[str, Any]
) -> None:
    tensors = {name: w for k, gate in sorted(gates.items()) for name, w in zip(gate_tensors(k), gate, strict=True)}
    alpha = options.alpha if math.isfinite(options.alpha) else None
    versions = {name: metadata.version(name) for name in RECORDED}
    training = {**asdict(options), "alpha": alpha, **record, "versions": versions}
    fields = {"model_fingerprint": model_fingerprint, "features": FEATURES, "training": json.dumps(training)}
    write_safetensors(path, tensors, fields)


def all_odds(work: WorkDirectory, gates: Mapping[int, GateWeights], *, held_out: bool) -> NDArray[np.float32]:
    """The odds of each gate [items, K], in the order of K."""
    return np.stack([gate_odds(work.read(f"inputs.{k - 2}", held_out=held_out), gates[k]) for k in sorted(gates)], 1)


def held_out_of(work: WorkDirectory, gates: Mapping[int, GateWeights]) -> HeldOut:
    """The held-out items of measurements, with the odds of each gate."""
    same, right, tokens = (work.read(name, held_out=True) for name in ("same", "right", "rows"))
    numbers: dict[object, int] = {}
    about = [tuple(map(image_key, item.images)) for item in work.items(held_out=True)]
    images = [numbers.setdefault(key, len(numbers)) for key in about]
    odds = all_odds(work, gates, held_out=True)
    return HeldOut(tuple(sorted(gates)), odds, same.astype(bool), right, tokens, images)
