"""The loop: which row each process takes at which step and K depends on the seed and the step alone, so it resumes."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.tuning.decoder import WithdrawingDecoder, tensors_of
from vtx.exporter.tuning.encoder import ImageEncoder
from vtx.exporter.tuning.options import LossWeights, TuneOptions
from vtx.exporter.tuning.packing import Row
from vtx.exporter.tuning.state import Log, StateFile
from vtx.runtime.errors import RequestError

TERMS = ("kl", "ce", "hidden")
WARM_UP = 0.03
MAX_NORM = 1.0
Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars: `kl` KL(teacher || student), nats a token; `ce` of the answers that the data give, 0 without any;
    `hidden` the squared distance of the last hidden states as a share of the teacher's; `total` their weighted sum.
    """

    total: Tensor
    kl: Tensor
    ce: Tensor
    hidden: Tensor


def losses(
    decoder: WithdrawingDecoder, student: Tensor, teacher: Tensor, row: dict[str, Tensor], weights: LossWeights
) -> Losses:
    """Of the hidden states [m, hidden] before the last norm, the student's and the teacher's."""
    logits = decoder.head(student)
    with torch.no_grad():
        expected = decoder.head(teacher).log_softmax(-1)
    kl = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).mean()
    given = row["given"]
    ce = F.cross_entropy(logits[given], row["targets"][given]) if given.any() else kl.new_zeros(())
    away = (student.float() - teacher.float()).square().sum(-1)
    hidden = (away / teacher.float().square().sum(-1).clamp(min=1e-12)).mean()
    total = weights.kl * kl + weights.ce * ce + weights.hidden * hidden
    return Losses(total, kl, ce, hidden)


@dataclass(frozen=True, slots=True)
class Order:
    """Which row, and which K, the n-th place of a training takes: epochs are shuffled, each on its own."""

    rows: int
    options: TuneOptions

    @property
    def steps(self) -> int:
        return self.options.schedule.steps_over(self.rows)

    def row(self, place: int) -> int:
        return _shuffled(self.rows, self.options.schedule.seed, place // self.rows)[place % self.rows]

    def k(self, place: int) -> int | None:
        rng = random.Random(f"K {self.options.schedule.seed} {place}")
        return None if rng.random() < self.options.full_share else self.options.depths.draw(rng)

    def lr(self, step: int) -> float:
        """A linear warm-up over 3% of the steps, then half a cosine down to 0."""
        warm = math.ceil(WARM_UP * self.steps)
        if step < warm:
            return self.options.schedule.lr * (step + 1) / warm
        return self.options.schedule.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))


@lru_cache(maxsize=2)
def _shuffled(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(f"rows {seed} {epoch}").shuffle(order)
    return tuple(order)


class Trainer:
    """Trains `decoder` on `rows`; `accelerator` (accelerate's) says which part of each batch is this process's."""

    def __init__(
        self, decoder: WithdrawingDecoder, encoder: ImageEncoder, rows: Sequence[Row], options: TuneOptions,
        accelerator: Any, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        batch, processes = options.schedule.batch, accelerator.num_processes
        if batch % processes:
            raise RequestError(f"--batch is {batch}, which is not a multiple of the {processes} processes; change it")
        self._decoder, self._encoder, self._rows, self._options = decoder, encoder, rows, options
        self._accelerator, self._dtype = accelerator, dtype
        self._share = batch // processes
        self._parameters = decoder.learning_parameters()
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=options.schedule.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.order = Order(len(rows), options)
        self._parallel = accelerator.prepare(decoder) if processes > 1 else decoder

    def run(self, state: StateFile, out: Path, report: Report) -> int:
        """Train from the saved state to the end, saving on the way; return the number of steps run here.

        Raises:
            RequestError: the loss or its gradient is not finite; the last saved state is left as it is.
            ExportError: a file cannot be written.

        """
        first, total = state.load(self._parameters, self._optimizer), self.order.steps
        main = self._accelerator.is_main_process
        log = Log(out, first) if main else None
        report(first, total)
        for step in range(first, total):
            began = time.perf_counter()
            means, norm = self._step(step)
            if not (math.isfinite(means[0]) and math.isfinite(norm)):
                self._refuse(step, means[0], norm, state)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if log:
                log.add({
                    "step": step + 1, "loss": means[0], **dict(zip(TERMS, means[1:], strict=False)), "k": means[-1],
                    "lr": self.order.lr(step), "grad_norm": norm, "seconds": time.perf_counter() - began,
                })  # fmt: skip
            if main and ((step + 1) % self._options.schedule.save_every == 0 or step + 1 == total):
                state.save(step + 1, self._parameters, self._optimizer)
            report(step + 1, total)
        self._accelerator.wait_for_everyone()
        return total - first

    def _step(self, step: int) -> tuple[list[float], float]:
        """Gradients of one batch; the means of loss, terms and K over it and over the processes, and the norm."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.order.lr(step)
        sums = torch.zeros(2 + len(TERMS), device=self._decoder.device)
        for part in range(self._share):
            place = (step * self._share + part) * self._accelerator.num_processes + self._accelerator.process_index
            last = part == self._share - 1
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self._parallel):
                sums += self._one(place)
        means = self._accelerator.reduce(sums / self._share, "mean").tolist()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), MAX_NORM)
        return means, float(norm)

    def _one(self, place: int) -> Tensor:
        row, k = self._rows[self.order.row(place)], self.order.k(place)
        device = self._decoder.device
        tensors, features = tensors_of(row, device), self._encoder(row.images)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            teacher = self._decoder.teach(tensors, features)
            student = self._parallel(tensors, features, k)
            found = losses(self._decoder, student, teacher, tensors, self._options.weights)
        self._accelerator.backward(found.total / self._share)
        depth = self._decoder.text.layers + 1 if k is None else k
        return torch.stack([found.total.detach(), *(getattr(found, t).detach() for t in TERMS),
                            found.total.new_tensor(float(depth)).detach()])  # fmt: skip

    def _refuse(self, step: int, loss: float, norm: float, state: StateFile) -> None:
        kept = "nothing had been saved" if not state.path.exists() else f"the last saved state is kept in {state.path}"
        raise RequestError(
            f"the training diverged at step {step + 1}: the loss is {loss:.3g}, the norm of its gradient {norm:.3g}; "
            f"{kept}. Lower --lr (now {self._options.schedule.lr:g}) and run again"
        )
