"""Time and memory of a tuning, estimated from its sizes and the speed of one matrix product on its device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vtx.exporter.bundling.rates import product_speed
from vtx.exporter.tuning.options import TuneOptions
from vtx.tools.estimate.sizes import ModelSize

BASE = 1 << 30  # Python, PyTorch, transformers and peft, before any weight
ADAM_BYTES = 16  # of a weight that learns: itself, its gradient and two moments in float32
_KEPT = 8  # hidden-sized and a few FFN-sized tensors that one layer keeps for its backward pass
_LOGITS = 4  # float32 tensors of the vocabulary's width in the loss, each with a gradient


@dataclass(frozen=True, slots=True)
class TuneForecast:
    """FLOPs and bytes; `memory` is that of one process."""

    flops: float
    memory: int

    def seconds(self, speed: float) -> float:
        return self.flops / speed


@dataclass(frozen=True, slots=True)
class RowSize:
    """Tokens of a packed row, those of its images, and those that predict an answer's."""

    tokens: int
    image: int
    answer: int


def forecast(size: ModelSize, rows: Sequence[RowSize], options: TuneOptions, *, element: int) -> TuneForecast:
    """Of one pass over `rows` times how often each is seen; `element` is the bytes of a base weight.

    A row costs the teacher's pass, the student's, its gradient with regard to hidden states, with --full that of the
    weights, and with gradient checkpointing the student's pass once more.
    """
    d, learns = size.decoder, options.learning.chosen(size.decoder.layers)
    seeing = (options.depths.low + options.depths.high) / 2 - 1
    passes = 2 + options.checkpointing + (options.learning.full * len(learns) / d.layers)
    macs = 0.0
    for row in rows:
        text = row.tokens - row.image
        student = d.layer_macs * (row.tokens * seeing + text * (d.layers - seeing))
        student = options.full_share * d.layer_macs * row.tokens * d.layers + (1 - options.full_share) * student
        macs += d.layer_macs * row.tokens * d.layers + passes * student + 3 * d.head_macs * row.answer
        macs += (size.vision.parameters if size.vision else 0) * row.image
    longest, answer = max(row.tokens for row in rows), max(row.answer for row in rows)
    kept = longest * (_KEPT * d.hidden + 3 * d.ffn)
    hidden = longest * d.hidden * d.layers + kept if options.checkpointing else kept * d.layers
    memory = BASE + element * d.parameters + 4 * (size.vision.parameters if size.vision else 0)
    memory += ADAM_BYTES * learning_weights(size, options) + element * hidden + 4 * _LOGITS * answer * d.vocab
    if options.learning.full:
        memory += element * len(learns) * d.layer_macs  # the teacher's copy of these layers
    schedule = options.schedule
    seen = schedule.steps_over(len(rows)) * schedule.batch / len(rows) if schedule.steps else schedule.epochs
    return TuneForecast(2 * macs * seen, int(memory))


def learning_weights(size: ModelSize, options: TuneOptions) -> int:
    """How many weights learn."""
    d, layers = size.decoder, len(options.learning.chosen(size.decoder.layers))
    if options.learning.full:
        return layers * (d.layer_macs + d.small_parameters // d.layers)
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    sides = 2 * (d.hidden + q) + 2 * (d.hidden + kv) + 3 * (d.hidden + d.ffn)
    return layers * options.learning.rank * sides


def device_speed(device: torch.device, dtype: torch.dtype, size: ModelSize, tokens: int) -> float:
    """FLOPs a second of a layer's largest product on a device."""
    d = size.decoder
    if device.type == "cpu" and dtype == torch.float32:
        return product_speed(d.hidden, d.ffn, tokens)
    a = torch.ones(tokens, d.hidden, device=device, dtype=dtype)
    b = torch.ones(d.ffn, d.hidden, device=device, dtype=dtype)
    torch.nn.functional.linear(a, b)[0, 0].item()
    began, count = time.perf_counter(), 8
    for _ in range(count):
        product = torch.nn.functional.linear(a, b)
    product[0, 0].item()  # waits for the device
    return 2 * a.numel() * len(b) * count / (time.perf_counter() - began)
