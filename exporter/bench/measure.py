"""Asking a bundle the same question at several K in turn, and noting times, rows and memory.

One turn of a K opens the image in a new conversation, asks, asks again, and then asks at the next K of the list: what
a second question costs when the image is there already, and when it has not been as deep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vtx.exporter.bench import machine
from vtx.exporter.bench.ceilings import Ceilings
from vtx.exporter.bench.stopwatch import Call, split, timed
from vtx.exporter.bench.work import Worker
from vtx.runtime.api.answer import Stats
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.prompt.messages import Part
from vtx.runtime.vision.image import ImageSource

K = int | str | None
Report = Callable[[str, int, int], None]
FILLER, ENDINGS = " a", (".", "a", " .", "?")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, and how often. `prompt_tokens` lengthens the question until the whole prompt has so many."""

    image: ImageSource
    question: str
    prompt_tokens: int | None = None
    new_tokens: int = 64
    repeats: int = 5
    warmup: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 2), ("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise RequestError(f"--{option} is {getattr(self, name)}; give a number from {least} on")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one K: milliseconds, the calls of the first question, and its report."""

    preprocess_ms: float
    second_ms: float
    stats: Stats
    prefill: Sequence[Call]
    decode: Sequence[Call]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the process held while a K's answer was open, and the most during its turn; None: unknown here."""

    steady: int | None
    peak: int | None


@dataclass(slots=True)
class Measurement:
    """What has been measured so far. `switched_ms` are second questions on an image that came by another K."""

    question: str
    machine: dict[str, Any]
    loaded: int | None
    memory: dict[K, Memory]
    predicted_s: float = 0.0
    turns: dict[K, list[Turn]] = field(default_factory=dict)
    switched_ms: dict[K, list[float]] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    interrupted: bool = False


class Bench:
    """A loaded bundle with a stopwatch on its backend, and the question to put to it."""

    def __init__(self, model: Model, work: Workload, ks: Sequence[K]) -> None:
        """Raises what a K that is not prebuilt, the image, or a question that does not fit raises."""
        loaded, about = machine.resident(), machine.describe()
        backend, self._calls = timed(model.backend)
        self.model, self.work, self.ks = Model(model.bundle, backend, model.load_ms), work, tuple(ks)
        self._options = Options(work.new_tokens, ignore_eos=True)
        self._image = self.model.prepare(work.image)
        self.found = Measurement(self._question(), about, loaded, {})
        self.worker = Worker(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)
        with self.model.open(work.image) as conversation:
            for k in self.ks:
                conversation.stream(self.found.question, k, self._options, reduce=None)
        self._check_room(self.tokens(self.found.question))

    def _question(self) -> str:
        """The question, or one of the length that was asked for: a word again and again, and an ending that fits."""
        wanted = self.work.prompt_tokens
        if wanted is None:
            return self.work.question
        self._check_room(wanted)
        one, two = (self.tokens(FILLER * count) for count in (1, 2))
        count = max(1, 1 + (wanted - one) // max(1, two - one))
        texts = [FILLER * count + ending for ending in ("", *ENDINGS)]
        lengths = [self.tokens(text) for text in texts]
        if wanted not in lengths:
            raise RequestError(
                f"--prompt-tokens is {wanted}, and the nearest prompt with an image that this tokenizer makes has "
                f"{min(lengths, key=lambda length: abs(length - wanted))} tokens; ask for that, or give a --question"
            )
        return texts[lengths.index(wanted)]

    def tokens(self, question: str) -> int:
        content: list[Part] = [{"type": "image"}, {"type": "text", "text": question}]
        return len(self.model.text.prompt([{"role": "user", "content": content}], self._image.tokens))

    def _check_room(self, tokens: int) -> None:
        room = self.model.manifest.max_context
        if tokens + self.work.new_tokens > room:
            raise ContextError(
                f"a prompt of {tokens} tokens and {self.work.new_tokens} new ones do not fit a context of {room}; "
                "take fewer of them, or export with a larger --max-context"
            )

    def probe(self) -> float:
        """Ask once at each K, note the memory, and return the seconds that `run` will take, roughly."""
        start = time.perf_counter()
        for k in self.ks:
            machine.forget_peak()
            _, self.found.memory[k], _ = self._turn(k, k)
        self.found.predicted_s = (time.perf_counter() - start) * (self.work.warmup + self.work.repeats)
        return self.found.predicted_s

    def run(self, ceilings: Ceilings | None, report: Report) -> Measurement:
        """All rounds, the K in turn and each of them first in one; Ctrl-C ends it and keeps what is whole."""
        self.found.ceilings = ceilings
        rounds = self.work.warmup + self.work.repeats
        try:
            for number in range(rounds):
                report("measuring", number, rounds)
                self._round(number, keep=number >= self.work.warmup)
            report("measuring", rounds, rounds)
        except KeyboardInterrupt:
            if not self.found.turns:
                raise
            self.found.interrupted = True
        return self.found

    def _round(self, number: int, *, keep: bool) -> None:
        if keep and self.found.ceilings:
            self.found.ceilings.measure()
        first = number % len(self.ks)
        order = (*self.ks[first:], *self.ks[:first])
        for k, other in zip(order, (*order[1:], order[0]), strict=True):
            turn, _, switched_ms = self._turn(k, other)
            if keep:
                self.found.turns.setdefault(k, []).append(turn)
            if keep and switched_ms is not None:
                self.found.switched_ms.setdefault(other, []).append(switched_ms)

    def _turn(self, k: K, other: K) -> tuple[Turn, Memory, float | None]:
        start = time.perf_counter()
        with self.model.open(self.work.image) as conversation:
            preprocess_ms = 1000 * (time.perf_counter() - start)
            self._calls.clear()
            stats = conversation.ask(self.found.question, k, self._options, reduce=None).stats
            prefill, decode = split(self._calls)
            memory = Memory(machine.resident(), machine.peak())
            second_ms = self._again(conversation, k)
            switched_ms = None if other == k else self._again(conversation, other)
        return Turn(preprocess_ms, second_ms, stats, prefill, decode), memory, switched_ms

    def _again(self, conversation: Conversation, k: K) -> float:
        """Milliseconds to the first token of one more question on an image that is there."""
        stats = conversation.ask(self.found.question, k, Options(max_new_tokens=1), reduce=None).stats
        return stats.timings_ms["first_token"]
