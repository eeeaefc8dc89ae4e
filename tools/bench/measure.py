"""Ask a bundle the same question at several K in turn, and record times, tokens and memory.

One turn of a K opens the image in a new conversation, asks, asks again, and then asks at the next K of the list: the
cost of a second question on an encoded image, at the same K and at another one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vtx.runtime.api.answer import Stats
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.units import Progress
from vtx.runtime.vision.image import ImageSource
from vtx.runtime.vision.video import Video
from vtx.tools.bench import machine
from vtx.tools.bench.ceilings.ceilings import Ceilings
from vtx.tools.bench.machine import Machine
from vtx.tools.bench.stopwatch import Call, split, timed
from vtx.tools.bench.work import WorkCounter
from vtx.tools.common import memory

K = int | str | None
FILLER = " a"
ENDINGS = (".", "a", " .", "?")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The question, and how often to ask it. `prompt_tokens` replaces it to make a prompt of that many tokens.

    `rest`: image tokens that stay from each numbered K on, "10%" or a number.
    """

    image: ImageSource | Video
    question: str
    prompt_tokens: int | None = None
    new_tokens: int = 64
    repeats: int = 5
    warmup: int = 1
    threads: int = 1
    rest: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 2), ("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise RequestError(f"--{option} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one K: milliseconds, the calls of the first question, and its report."""

    preprocess_ms: float
    second_ms: float
    stats: Stats
    prefill: Sequence[Call]
    decode: Sequence[Call]


@dataclass(slots=True)
class BenchResult:
    """The measurements so far. `switched_ms` are of second questions on an image first asked about at another K.

    `memory`: bytes held while a K's answer was open, and their peak during the turn; None: unknown here.
    """

    question: str
    machine: Machine
    loaded: int | None
    memory: dict[K, tuple[int | None, int | None]]
    predicted_s: float = 0.0
    turns: dict[K, list[Turn]] = field(default_factory=dict)
    switched_ms: dict[K, list[float]] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    interrupted: bool = False


class Bench:
    """A loaded bundle with a stopwatch on its backend, and the question to ask it."""

    def __init__(self, model: Model, options: BenchOptions, ks: Sequence[K]) -> None:
        """Raises VtxError for a K that is not prebuilt, a bad image, or a question that does not fit."""
        loaded = memory.resident()
        description = machine.describe()
        backend, self._calls = timed(model.backend)
        self.model = Model(model.bundle, backend, model.loaded.load_ms)
        self.options = options
        self.ks = tuple(ks)
        (self._image,) = self.model.loaded.images.prepare_all([options.image])
        self.result = BenchResult(self._question(), description, loaded, {})
        self.counter = WorkCounter(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)
        with self.model.open(options.image) as conversation:
            for k in self.ks:
                conversation.stream(self.result.question, k, self._answered(k), reduce=None)
        self._check_room(self.tokens(self.result.question))

    def _answered(self, k: K, tokens: int | None = None) -> Options:
        """The options of an answer at a K, of all new tokens or of this number."""
        rest = self.options.rest if isinstance(k, int) else None
        return Options(self.options.new_tokens if tokens is None else tokens, ignore_eos=True, rest=rest)

    def _question(self) -> str:
        """The question, or one of the requested length: a repeated word and a fitting ending."""
        target = self.options.prompt_tokens
        if target is None:
            return self.options.question
        self._check_room(target)
        single, double = (self.tokens(FILLER * count) for count in (1, 2))
        count = max(1, 1 + (target - single) // max(1, double - single))
        texts = [FILLER * count + ending for ending in ("", *ENDINGS)]
        lengths = [self.tokens(text) for text in texts]
        if target not in lengths:
            raise RequestError(
                f"--prompt-tokens is {target}, and the nearest prompt with an image that this tokenizer makes has "
                f"{min(lengths, key=lambda length: abs(length - target))} tokens; ask for that, or give a --question"
            )
        return texts[lengths.index(target)]

    def tokens(self, question: str) -> int:
        content = opening_parts([self._image], question)
        return len(self.model.loaded.text.prompt([{"role": "user", "content": content}], [self._image.in_prompt]))

    def _check_room(self, tokens: int) -> None:
        room = self.model.manifest.max_context
        if tokens + self.options.new_tokens > room:
            raise ContextError(
                f"a prompt of {tokens} tokens and {self.options.new_tokens} new tokens do not fit a context of {room}; "
                f"use fewer{self.model.manifest.or_more_context}"
            )

    def probe(self) -> float:
        """Ask once at each K, record the memory, and return a rough estimate of the seconds that `run` takes."""
        start = time.perf_counter()
        for k in self.ks:
            memory.forget_peak()
            _, self.result.memory[k], _ = self._turn(k, k)
        self.result.predicted_s = (time.perf_counter() - start) * (self.options.warmup + self.options.repeats)
        return self.result.predicted_s

    def run(self, ceilings: Ceilings | None, report: Progress) -> BenchResult:
        """Run all rounds, each starting at another K; Ctrl-C stops and keeps the complete turns."""
        self.result.ceilings = ceilings
        rounds = self.options.warmup + self.options.repeats
        try:
            for number in range(rounds):
                report("measuring", number, rounds)
                keep = number >= self.options.warmup
                first = number % len(self.ks)
                if keep and self.result.ceilings:
                    self.result.ceilings.measure()
                order = (*self.ks[first:], *self.ks[:first])
                for k, other in zip(order, (*order[1:], order[0]), strict=True):
                    turn, _, switched_ms = self._turn(k, other)
                    if keep:
                        self.result.turns.setdefault(k, []).append(turn)
                    if keep and switched_ms is not None:
                        self.result.switched_ms.setdefault(other, []).append(switched_ms)
            report("measuring", rounds, rounds)
        except KeyboardInterrupt:
            if not self.result.turns:
                raise
            self.result.interrupted = True
        return self.result

    def _turn(self, k: K, other: K) -> tuple[Turn, tuple[int | None, int | None], float | None]:
        start = time.perf_counter()
        with self.model.open(self.options.image) as conversation:
            preprocess_ms = 1000 * (time.perf_counter() - start)
            self._calls.clear()
            stats = conversation.ask(self.result.question, k, self._answered(k), reduce=None).stats
            prefill, decode = split(self._calls)
            memory_bytes = memory.resident(), memory.peak()
            second_ms = self._again(conversation, k)
            switched_ms = None if other == k else self._again(conversation, other)
        return Turn(preprocess_ms, second_ms, stats, prefill, decode), memory_bytes, switched_ms

    def _again(self, conversation: Conversation, k: K) -> float:
        """Milliseconds to the first token of one more question on an image that is already encoded."""
        stats = conversation.ask(self.result.question, k, self._answered(k, 1), reduce=None).stats
        return stats.timings_ms["first_token"]
