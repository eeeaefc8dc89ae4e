"""The settings of a tuning: the K that training draws, the terms of the loss, the weights to train."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtx.exporter.bundling.options import DEMO
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.policies import parse
from vtx.runtime.policies.base import Entry, Needs
from vtx.tools.data.items import SCENES

TUNED = "use a model with a llama, mistral, qwen2 or qwen3 text model"
NO_GAPS = "this model has text between its image tokens or three-part positions, so no token can be dropped"
AROUND = 2  # layers on either side of a single K
_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
Dtype = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class Depths:
    """The K that training draws, `low` to `high`: all alike, or around `target`, the nearer the likelier."""

    low: int
    high: int
    target: int | None = None

    @classmethod
    def parse(cls, text: str) -> Depths:
        """Read `8` (6 to 10, 8 the most often) or `4-12` (each alike). Raises RequestError."""
        if not (match := _SPAN.fullmatch(text.strip())):
            raise RequestError(f"--k is {text!r}; give a layer such as 8, or a range such as 4-12")
        low = int(match[1])
        high = int(match[2] or match[1])
        if not 2 <= low <= high:
            raise RequestError(f"--k is {text}; it must be at least 2, and a range must rise")
        return cls(low, high) if match[2] else cls(max(2, low - AROUND), low + AROUND, low)

    def within(self, layers: int) -> Depths:
        """The same for a model of `layers` layers. Raises RequestError if a K is beyond it."""
        limit = self.high if self.target is None else self.target
        if limit > layers:
            raise RequestError(f"K = {limit} is beyond the model's {layers} layers; it must be 2 to {layers}")
        return Depths(self.low, min(self.high, layers), self.target)

    def draw(self, rng: random.Random) -> int:
        ks = range(self.low, self.high + 1)
        weights = [1 if self.target is None else 1 + AROUND - abs(k - self.target) for k in ks]
        return rng.choices(ks, weights)[0]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the loss's terms: divergence from the teacher, cross-entropy of given answers, hidden states."""

    kl: float = 1.0
    ce: float = 1.0
    hidden: float = 0.0

    def __post_init__(self) -> None:
        values = (self.kl, self.ce, self.hidden)
        if not all(0 <= value < float("inf") for value in values) or not any(values):
            raise RequestError(
                f"--kl-weight is {self.kl}, --ce-weight {self.ce} and --hidden-weight {self.hidden}; they must be "
                "finite, at least 0, and one of them above 0"
            )


@dataclass(frozen=True, slots=True)
class Learning:
    """The weights to train: adapters of `rank` on every matrix of `layers` (None: all), or with `full` these
    layers' weights themselves. `qlora`: the matrices below the adapters are held in 4 bits.
    """

    rank: int = 16
    alpha: int = 32
    layers: tuple[int, int] | None = None
    full: bool = False
    qlora: bool = False

    def __post_init__(self) -> None:
        if self.full and self.qlora:
            raise RequestError(
                "--full trains the weights themselves and --qlora holds them in 4 bits; give one of them"
            )
        if not 1 <= self.rank <= 4096 or not 1 <= self.alpha <= 65536:
            raise RequestError(f"--rank is {self.rank} and --alpha {self.alpha}; they must be 1 to 4096 and 1 to 65536")

    @staticmethod
    def parse_layers(text: str) -> tuple[int, int]:
        """`7` or `1-7`, counted from 1. Raises RequestError."""
        match = _SPAN.fullmatch(text.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise RequestError(f"--layers is {text!r}; give a layer such as 7, or a range such as 1-7")
        return first, last

    def chosen(self, layers: int) -> range:
        """The layers that learn, from 1, in a model of `layers` layers. Raises RequestError."""
        first, last = self.layers or (1, layers)
        if last > layers:
            raise RequestError(f"--layers names layer {last}, the model has {layers}; name 1 to {layers}")
        return range(first, last + 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and speed: `batch` rows a step over all processes; AdamW at `lr`. `steps` overrides `epochs`."""

    lr: float = 2e-4
    epochs: float = 1.0
    batch: int = 8
    save_every: int = 50
    seed: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 1 or not 0 < self.epochs <= 1000:
            raise RequestError(f"--lr is {self.lr} and --epochs {self.epochs}; they must be above 0, to 1 and to 1000")
        if self.batch < 1 or self.save_every < 1:
            raise RequestError(f"--batch is {self.batch} and --save-every {self.save_every}; both must be at least 1")
        if self.steps is not None and self.steps < 1:
            raise RequestError(f"--steps is {self.steps}; it must be at least 1")
        if not 0 <= self.seed < 1 << 32:
            raise RequestError(f"--seed is {self.seed}; it must be 0 to 4294967295")

    def steps_over(self, rows: int) -> int:
        return self.steps or max(1, math.ceil(self.epochs * rows / self.batch))


@dataclass(frozen=True, slots=True)
class Packing:
    """The questions about one image that share a row: at most `questions` of them and `max_tokens` tokens."""

    questions: int = 8
    max_tokens: int = 2048
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.questions < 1 or self.max_tokens < 1 or self.max_new_tokens < 1:
            raise RequestError(
                f"--questions is {self.questions}, --max-tokens {self.max_tokens} and --max-new-tokens "
                f"{self.max_new_tokens}; they must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Everything a tuning depends on. `full_share` of the images are seen without withdrawal, so that it stays good.

    With 1 it is the control: what the data teach the same weights without any withdrawal. `judged` is the precision of
    the bundles whose engines judge it, None for the reference in float32. `reduce`: the spec of a reduction through
    which the student sees the images that are not seen in full, or "none". With `gates` the second half of the training
    withdraws where gates choose, if that is earlier than the drawn K.
    """

    depths: Depths
    model: str = DEMO
    data: str = SCENES
    images: Path | None = None
    items: int = 1000
    held_out: int = 250
    full_share: float = 0.2
    weights: LossWeights = field(default_factory=LossWeights)
    learning: Learning = field(default_factory=Learning)
    schedule: Schedule = field(default_factory=Schedule)
    packing: Packing = field(default_factory=Packing)
    dtype: Dtype = "auto"
    checkpointing: bool = True
    judged: str | None = None
    reduce: str = "none"
    gates: bool = False

    def __post_init__(self) -> None:
        if self.items < 1 or self.held_out < 0:
            raise RequestError(f"--items is {self.items} and --held-out {self.held_out}; at least 1 and 0")
        if not 0 <= self.full_share <= 1:
            raise RequestError(f"--full-share is {self.full_share}; it must be from 0 to 1")
        if self.gates and not self.held_out:
            raise RequestError("--gates are judged on items held out, and --held-out is 0; hold some out")

    def entry(self, config: ModelConfig) -> Entry | None:
        """The step before the decoder of `reduce`. Raises RequestError for a reduction that is not trained with."""
        if self.reduce == "none":
            return None
        parts = parse(self.reduce)
        entry = parts[0].entry()
        alone = len(parts) == 1 and parts[0].needs() == Needs() and not parts[0].of_videos
        if entry is None or not alone or entry.uses_question or entry.keeps_positions:
            raise RequestError(
                f"--reduce {self.reduce} reads more than an image's tokens, and vtx-tune trains with what selects by "
                "these alone: divprune, random, cdpruner:text=none; use one of them, or leave it out"
            )
        if config.text.rope.sections or config.layout.has_text:
            raise RequestError(f"--reduce {self.reduce}: {NO_GAPS}; leave it out")
        return entry


def check_tunable(config: ModelConfig, name: str, *, original: bool) -> None:
    """Raise UnsupportedModelError for a model that is not tuned; `original`: in its authors' layout."""
    if original:
        raise UnsupportedModelError(
            f"{name} is in its authors' layout, but vtx-tune writes Hugging Face's; use one in Hugging Face's"
        )
    if config.text.sliding is not None:
        raise UnsupportedModelError(f"{name} has sliding-window layers, which vtx-tune does not support; {TUNED}")
    if config.text.factors or config.text.shifts:
        raise UnsupportedModelError(
            f"{name} has a text model ({config.text.family}) with its own multipliers or norms, which vtx-tune does "
            f"not support; {TUNED}"
        )
    if config.text.post_norms:
        raise UnsupportedModelError(
            f"{name} has norms behind attention and the MLP, which vtx-tune does not support; {TUNED}"
        )
    if config.text.conv_layers:
        raise UnsupportedModelError(f"{name} has layers that keep a state, which vtx-tune does not support; {TUNED}")
