"""The training loop: the row and the K of each step and process depend only on the seed and the step, so it resumes.

Image tokens come from the tower and the projector, which tuning does not change, and are kept up to a limit of bytes.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.reference.model import Encoded, Reference
from vtx.exporter.reference.prompts import Source
from vtx.exporter.training import learning_rate_factor
from vtx.exporter.weights.tensors import CheckpointWeights
from vtx.runtime.bundle.safetensors import EVERY, RowIndex
from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Entry
from vtx.runtime.vision.image import ImageSource
from vtx.runtime.vision.tokens import ImageTokens
from vtx.tools.data.items import image_key
from vtx_tune.decoder import WithdrawingDecoder, tensors_of
from vtx_tune.options import LossWeights, TuneOptions
from vtx_tune.packing import Row
from vtx_tune.state import Log, StateFile

TERMS = ("kl", "ce", "hidden")
MAX_NORM = 1.0


def losses(
    decoder: WithdrawingDecoder, student: Tensor, teacher: Tensor, row: dict[str, Any], weights: LossWeights
) -> dict[str, Tensor]:
    """The losses from hidden states [m, hidden] before the last norm, the student's and the teacher's: scalars.

    `kl` KL(teacher || student), nats a token; `ce` of the answers that the data give, 0 without any; `hidden` the
    squared distance of the last hidden states as a share of the teacher's; `total` their weighted sum.
    """
    logits = decoder.head(student)
    with torch.no_grad():
        expected = decoder.head(teacher).log_softmax(-1)
    kl = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).mean()
    mask = row["given"]
    ce = F.cross_entropy(logits[mask], row["targets"][mask]) if mask.any() else kl.new_zeros(())
    away = (student.float() - teacher.float()).square().sum(-1)
    hidden = (away / teacher.float().square().sum(-1).clamp(min=1e-12)).mean()
    total = weights.kl * kl + weights.ce * ce + weights.hidden * hidden
    return {"total": total, "kl": kl, "ce": ce, "hidden": hidden}


@dataclass(frozen=True, slots=True)
class Order:
    """The row and the K of the n-th example of a training; each epoch is shuffled anew.

    `chosen`: for each row the K that gates choose for its questions, None for none. A row leaves before one of these if
    it is earlier than the drawn K.
    """

    rows: int
    options: TuneOptions
    chosen: Sequence[Sequence[int | None]] = ()

    @property
    def steps(self) -> int:
        return self.options.schedule.steps_over(self.rows)

    def row(self, example: int) -> int:
        return _shuffled(self.rows, self.options.schedule.seed, example // self.rows)[example % self.rows]

    def k(self, example: int) -> int | None:
        rng = random.Random(f"K {self.options.schedule.seed} {example}")
        if rng.random() < self.options.full_share:
            return None
        depth = self.options.depths.draw(rng)
        choice = rng.choice(self.chosen[self.row(example)]) if self.chosen else None
        return depth if choice is None else min(depth, choice)

    def lr(self, step: int) -> float:
        return self.options.schedule.lr * learning_rate_factor(step, self.steps)


@lru_cache(maxsize=2)
def _shuffled(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(f"rows {seed} {epoch}").shuffle(order)
    return tuple(order)


class Trainer:
    """Trains `decoder` on `rows`; `accelerator` (accelerate's) assigns a part of each batch to this process."""

    def __init__(
        self,
        decoder: WithdrawingDecoder,
        encoder: ImageEncoder,
        rows: Sequence[Row],
        options: TuneOptions,
        accelerator: Any,
        dtype: torch.dtype,
    ) -> None:
        batch = options.schedule.batch
        processes = accelerator.num_processes
        if batch % processes:
            raise RequestError(f"--batch is {batch}, which is not a multiple of the {processes} processes; change it")
        self._decoder = decoder
        self._encoder = encoder
        self._rows = rows
        self._options = options
        self._accelerator = accelerator
        self._dtype = dtype
        self._share = batch // processes
        self._parameters = decoder.learning_parameters()
        lr = options.schedule.lr
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.order = Order(len(rows), options)

    def follow(self, chosen: Sequence[int | None]) -> None:
        """Withdraw where gates choose for each question, from the next step on."""
        self.order = replace(self.order, chosen=[[chosen[n] for n in row.numbers] for row in self._rows])

    def run(self, state: StateFile, out: Path, report: Callable[[int, int], None], end: int | None = None) -> None:
        """Train from the saved state to the step `end` (None: the last), saving on the way and there."""
        first = state.load(self._parameters, self._optimizer)
        total = self.order.steps
        end = total if end is None else end
        log = Log(out, first) if self._accelerator.is_main_process else None
        report(first, total)
        for step in range(first, end):
            began = time.perf_counter()
            means, norm = self._step(step)
            if not (math.isfinite(means[0]) and math.isfinite(norm)):
                saved = state.path.exists()
                remark = f"the last saved state is kept in {state.path}" if saved else "nothing had been saved"
                raise RequestError(
                    f"the training diverged at step {step + 1}: the loss is {means[0]:.3g}, the norm of its gradient "
                    f"{norm:.3g}; {remark}. Lower --lr (now {self._options.schedule.lr:g}) and run again"
                )
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if log:
                log.add(
                    {
                        "step": step + 1,
                        "loss": means[0],
                        **dict(zip(TERMS, means[1:], strict=False)),
                        "k": means[-1],
                        "lr": self.order.lr(step),
                        "grad_norm": norm,
                        "seconds": time.perf_counter() - began,
                    }
                )
                if (step + 1) % self._options.schedule.save_every == 0 or step + 1 == end:
                    state.save(step + 1, self._parameters, self._optimizer)
            report(step + 1, total)
        self._accelerator.wait_for_everyone()

    def _step(self, step: int) -> tuple[list[float], float]:
        """Gradients of one batch; the means of loss, terms and K over it and over the processes, and the norm."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.order.lr(step)
        device = self._decoder.device
        sums = torch.zeros(2 + len(TERMS), device=self._decoder.device)
        for part in range(self._share):
            example = (step * self._share + part) * self._accelerator.num_processes + self._accelerator.process_index
            row = self._rows[self.order.row(example)]
            k = self.order.k(example)
            encoded = self._encoder(row.images)
            tensors = tensors_of(row, encoded, device)
            features = encoded.hidden
            encoded_image = tensors, features
            if k is not None and encoded.kept is not None:
                encoded_image = selected(tensors, features, encoded.kept.to(device))
            with torch.autocast(device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                teacher = self._decoder.teach(tensors, features)
                student = self._decoder(*encoded_image, k)
                loss = losses(self._decoder, student, teacher, tensors, self._options.weights)
            self._accelerator.backward(loss["total"] / self._share)
            depth = loss["total"].new_tensor(float(self._decoder.text.layers + 1 if k is None else k))
            sums += torch.stack([*(loss[term].detach() for term in ("total", *TERMS)), depth])
        for parameter in self._parameters.values():  # each process holds all that learns
            parameter.grad = self._accelerator.reduce(parameter.grad, "mean")
        means = self._accelerator.reduce(sums / self._share, "mean").tolist()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), MAX_NORM)
        return means, float(norm)


KEPT_BYTES = 1 << 30  # of encoded images


class ResidentWeights(CheckpointWeights):
    """`WeightSource` that keeps weights that were read in full on a device, in float32."""

    def __init__(self, source: Source, device: torch.device) -> None:
        super().__init__(source.checkpoint)
        self._device = device
        self._read = dict[str, Tensor]()

    def read(self, name: str, rows: RowIndex = EVERY) -> Tensor:
        if isinstance(rows, slice) and rows == EVERY:
            if name not in self._read:
                self._read[name] = super().read(name).to(self._device)
            return self._read[name]
        return super().read(name, rows).to(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenImages(Encoded):
    """As `Encoded`; `kept` [image tokens] bool: those that enter the student's decoder, None: all."""

    kept: Tensor | None = None

    @classmethod
    def of(cls, tokens: Sequence[ImageTokens], maps: tuple[Tensor, ...], entry: Entry | None) -> ChosenImages:
        masks = list[Tensor]()
        for image in tokens if entry is not None else ():
            assert entry is not None
            tensors = entry.select(image)
            mask = torch.zeros(len(image), dtype=torch.bool)
            mask[slice(None) if tensors is None else torch.from_numpy(tensors)] = True
            masks.append(mask)
        offsets = tuple(tokens) if any(image.offsets is not None for image in tokens) else ()
        hidden = torch.cat([torch.from_numpy(image.hidden) for image in tokens])
        return cls(hidden, offsets, maps, kept=torch.cat(masks) if masks else None)


def selected(row: dict[str, Any], features: Tensor, kept: Tensor) -> tuple[dict[str, Any], Tensor]:
    """A row and its image tokens without those not `kept`; the others take positions without gaps."""
    stays = ~row["image"]
    stays[row["image"]] = kept
    places = torch.cumsum(stays, 0) - 1
    asked = row["positions"] - (~kept).sum()
    positions = torch.where(row["blocks"] == 0, places, asked)[stays]
    changed = {name: row[name][stays] for name in ("ids", "blocks", "image")}
    return {**row, **changed, "positions": positions, "at": places[row["at"]]}, features[kept]


class ImageEncoder:
    """Images to their tokens, float32 and computed in float32; `entry` selects those that the student sees."""

    def __init__(self, source: Source, device: torch.device, entry: Entry | None = None) -> None:
        self._entry = entry
        self._reference = Reference(source.checkpoint, source.config, ResidentWeights(source, device))
        self._settings = source.image
        self._device = device
        self._kept: OrderedDict[tuple[object, ...], ChosenImages] = OrderedDict()
        self._bytes = 0

    @torch.no_grad()
    def __call__(self, images: tuple[ImageSource, ...]) -> ChosenImages:
        key = tuple(map(image_key, images))
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            with torch.autocast(self._device.type, enabled=False):
                tokens, maps = self._reference.image_tokens(images, self._settings)
            encoded = ChosenImages.of(tokens, maps, self._entry)
            self._kept[key] = encoded
            self._bytes += _bytes(encoded)
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= _bytes(self._kept.popitem(last=False)[1])
        entry = self._kept[key]
        maps = tuple(layer_map.to(self._device) for layer_map in entry.maps)
        return replace(entry, hidden=entry.hidden.to(self._device), maps=maps)


def _bytes(encoded: Encoded) -> int:
    return sum(tensor.nbytes for tensor in (encoded.hidden, *encoded.maps))
