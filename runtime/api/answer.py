"""An answer: its text and cost, the options it was asked with, and its pieces as they come."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.methods.gate import Decision
from vtx.runtime.session.prefix import ImageEncoders
from vtx.runtime.session.reduction_report import ReductionReport
from vtx.runtime.session.result import Selection
from vtx.runtime.session.sampling import Sampling
from vtx.runtime.vision.tokens import ImageTokens


@dataclass(frozen=True, slots=True)
class Stats:
    """What an answer cost. Per-layer lists start with layer 1; times are milliseconds.

    `k` is the first layer without vision rows and None where they stayed; `exit_layer` is the last layer
    with them, None likewise. `kv_slots` and `kv_bytes` count filled slots right after the prompt.
    `timings_ms.first_token` runs from the question to the first token, vision and prefill included.
    `device` computes in `compute`, f32 or bf16, with weights stored in `precision`.
    `gate` holds the decisions of the gates, in the order they were asked, where K was "auto"; else None.
    `reduce` is the canonical word of the reductions, and `reduced` what they did; None where there are none.
    """

    k: int | None
    full_layers: int
    exit_layer: int | None
    prompt_tokens: int
    vision_tokens: int
    vision_tokens_kept: tuple[int, ...]
    kv_slots: tuple[int, ...]
    kv_bytes: int
    reused_image: bool
    device: str
    compute: str
    precision: str
    timings_ms: dict[str, float]
    gate: tuple[Decision, ...] | None = None
    reduce: str = "none"
    reduced: ReductionReport | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text, its token ids (an end token included), its cost, and why it ended.

    `stopped` is "end" (an end token), "length" (`max_new_tokens`) or "context" (no KV slot left).
    """

    text: str
    token_ids: tuple[int, ...]
    stats: Stats
    stopped: str

    def to_dict(self) -> dict[str, Any]:
        """The object that `vtx-run --json` prints."""
        facts = {"text": self.text, "token_ids": self.token_ids, **dataclasses.asdict(self.stats)}
        facts |= facts.pop("reduced") or {}
        return facts if facts["gate"] is not None else {k: v for k, v in facts.items() if k != "gate"}


@dataclass(frozen=True, slots=True)
class Options:
    """Limits and sampling of one answer."""

    max_new_tokens: int = 256
    ignore_eos: bool = False
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    gate_threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; give a number from 1 on")


class AnswerStream:
    """An iterator over pieces of text as they come; `answer` is there when it is exhausted.

    It ends early when the same thread puts the next question before this one has been read to its end.
    """

    def __init__(self, pieces: Callable[[AnswerStream], Generator[str]]) -> None:
        self._answer: Answer | None = None
        self._selection: Selection | None = None
        self._pieces = pieces(self)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        if self._answer is None:
            raise RequestError("the answer is not complete; read its stream to the end, before the next question")
        return self._answer

    def close(self) -> None:
        """Stop here; the answer stays incomplete."""
        self._pieces.close()

    def read(self) -> Answer:
        """Run to the end and return the answer."""
        for _ in self._pieces:
            pass
        return self.answer


class Clock:
    """Milliseconds of the parts of one answer."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._vision = 0.0
        self._prefilled = self._first = self._last = self._start
        self._tokens = 0

    def vision(self, encode: Callable[[], ImageTokens]) -> ImageTokens:
        start = time.perf_counter()
        image = encode()
        self._vision += time.perf_counter() - start
        return image

    def all_vision(self, encoders: ImageEncoders) -> ImageEncoders:
        """The same encoders, their time measured."""
        return tuple((key, lambda encode=encode: self.vision(encode)) for key, encode in encoders)

    def prefilled(self) -> None:
        self._prefilled = time.perf_counter()

    def token(self) -> None:
        self._last = time.perf_counter()
        self._first = self._last if not self._tokens else self._first
        self._tokens += 1

    def timings(self) -> dict[str, float]:
        per_token = (self._last - self._first) / (self._tokens - 1) if self._tokens > 1 else 0.0
        times = {
            "vision": self._vision,
            "prefill": self._prefilled - self._start - self._vision,
            "first_token": self._first - self._start,
            "decode_per_token": per_token,
        }
        return {name: round(1000 * seconds, 3) for name, seconds in times.items()}
