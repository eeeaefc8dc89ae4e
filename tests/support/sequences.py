"""Random sequences of questions, chats and abandoned answers, each complete answer held against a fresh one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.support.near import assert_near
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Chat, Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.session.sampling import Sampler, Sampling

OPTIONS = Options(max_new_tokens=5, ignore_eos=True, timeout=1.0)  # seconds of the sequences' own clock
QUESTIONS = ("red?", "Where is the red star?", "Where is the blue circle in it?", "How many?")
CHATS = 3  # of one conversation, at most
DRAFTS = (0, 0, 3, 8)  # tokens of a draft that prompt lookup may make
CALLS = 16  # of a short answer, at most, to stages and the head
Setting = tuple[int | str | None, str] | tuple[int | str | None, str, str]  # K, reductions and maybe a rest


def options_of(setting: Setting, sampling: Sampling) -> Options:
    return replace(OPTIONS, sampling=sampling, rest=setting[2] if len(setting) == 3 else None)


@dataclass(frozen=True)
class End:
    """An answer is not read to its end: what happens at which call of a stage or the head, or after which piece."""

    how: Literal["interrupt", "cancel", "timeout", "leave"]
    at: int


@dataclass(frozen=True)
class Step:
    """One call: `chat` None is an independent question; `end` None reads the answer to its end.

    `via`: the number of the conversation in which these `images` replace those before; None: that of the images.
    """

    question: int
    setting: int
    chat: int | None = None
    end: End | None = None
    images: int = 0  # which ones
    lookup: int = 0  # tokens of a draft
    via: int | None = None


def steps(settings: int, conversations: int = 1) -> st.SearchStrategy[list[Step]]:
    """Sequences of steps over so many settings and conversations; a third of the answers is not read to its end."""
    at_call = st.builds(End, st.sampled_from(["interrupt", "cancel", "timeout"]), st.integers(1, CALLS))
    end = at_call | st.builds(End, st.just("leave"), st.integers(0, OPTIONS.max_new_tokens - 1))
    step = st.builds(
        Step,
        question=st.integers(0, len(QUESTIONS) - 1),
        setting=st.integers(0, settings - 1),
        chat=st.none() | st.integers(0, CHATS - 1),
        end=st.none() | st.none() | end,
        images=st.integers(0, conversations - 1),
        lookup=st.sampled_from(DRAFTS),
        via=st.none() | st.integers(0, conversations - 1),
    )
    return st.lists(step, min_size=2, max_size=8)


@dataclass(frozen=True, slots=True)
class NotedSampling(Sampling):
    """Notes the logits [vocab] that each token of an answer was drawn from."""

    rows: list[NDArray[np.float32]] = field(default_factory=list, compare=False)

    @property
    def logits(self) -> NDArray[np.float32]:
        """Those of all tokens so far, [tokens, vocab]."""
        return np.stack(self.rows)


class _NotingSampler(Sampler):
    def __call__(self, logits: NDArray[np.float32]) -> int:
        assert isinstance(self._settings, NotedSampling)
        self._settings.rows.append(logits.copy())
        return super().__call__(logits)


@contextmanager
def noted() -> Iterator[None]:
    """Answers with `NotedSampling` note their logits."""
    with patch("vtx.runtime.api.answering.Sampler", _NotingSampler):
        yield


class CallCounter:
    """A backend that counts calls of stages and the head, and acts at one of them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.at(0, lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def at(self, call: int, act: Callable[[], None]) -> None:
        """From now on, `act` before that call; calls count from 1."""
        self._left, self._act = call, act

    def head(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        self._count()
        logits: NDArray[np.float32] = self._backend.head(rows)
        return logits

    def stage(self, index: int, capacity: int) -> Any:
        cache = self._backend.stage(index, capacity)
        append = cache.append

        def counted(*args: Any, **keywords: Any) -> Any:
            self._count()
            return append(*args, **keywords)

        cache.append = counted
        return cache

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


Fresh = tuple[Answer, NDArray[np.float32]]


@dataclass
class Sequences:
    """One model, the images of each conversation, and the fresh answers computed so far."""

    model: Model
    images: Sequence[Sequence[Image.Image]]
    settings: Sequence[Setting]
    tolerance: float
    counts: Counter[str] = field(default_factory=Counter)
    _fresh: dict[tuple[int, int, tuple[int, ...]], Fresh] = field(default_factory=dict)
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._calls = CallCounter(self.model.backend)
        self.model = Model(self.model.bundle, self._calls, self.model.loaded.load_ms)  # type: ignore[arg-type]

    def check(self, sequence: Sequence[Step]) -> None:
        """Put the sequence to its conversations; raise AssertionError where an answer is not a fresh one's."""
        with noted(), patch("vtx.runtime.api.turns.monotonic", lambda: self._now):
            self._check(sequence)
        self.counts["sequences"] += 1

    def _check(self, sequence: Sequence[Step]) -> None:
        conversations = [self.model.open(list(images)) for images in self.images]
        shown = [*range(len(conversations))]  # the images of each
        chats: dict[tuple[int, int], tuple[Chat, int, list[int]]] = {}
        left: list[AnswerStream] = []
        for step in sequence:
            setting, before, chat = step.setting, list[int](), None
            via = step.images if step.via is None else step.via
            if shown[via] != step.images:
                conversations[via].replace(list(self.images[step.images]))
                shown[via] = step.images
                chats = {which: chat for which, chat in chats.items() if which[0] != via}
                self.counts["replaced"] += 1
            if step.chat is not None:
                k, reduce = self.settings[setting][:2]
                new = conversations[via].chat(k, reduce=reduce), setting, list[int]()
                chat, setting, before = chats.setdefault((via, step.chat), new)
            sampling = NotedSampling()
            options = replace(options_of(self.settings[setting], sampling), prompt_lookup=step.lookup)
            stream = self._stream(conversations[via], chat, step, options)
            answer = self._read(stream, step.end)
            left.append(stream)  # held, so that nothing ends it but the next question
            wanted, logits = self._fresh_answer(step.images, setting, (*before, step.question))
            if answer is None:
                continue
            if answer.stopped in ("cancelled", "timeout"):
                assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)]
                continue
            before.append(step.question)
            self.counts["drafted"] += answer.stats.drafted or 0
            self.counts["accepted"] += answer.stats.accepted or 0
            same_answer(answer, sampling.logits, wanted, logits, self.tolerance)

    def _stream(self, conversation: Conversation, chat: Chat | None, step: Step, options: Options) -> AnswerStream:
        if chat is not None:
            return chat.stream(QUESTIONS[step.question], options)
        k, reduce = self.settings[step.setting][:2]
        return conversation.stream(QUESTIONS[step.question], k, options, reduce=reduce)

    def _read(self, stream: AnswerStream, end: End | None) -> Answer | None:
        """The answer, or None where an interrupt left none, or somebody reads it later."""
        self.counts[end.how if end else "complete"] += 1
        if end is not None and end.how == "leave":
            read = sum(1 for _ in zip(range(end.at), stream, strict=False))
            return stream.answer if read < end.at else None
        if end is not None:
            acts = {"interrupt": _interrupt, "cancel": _canceller(stream), "timeout": self._pass}
            self._calls.at(end.at, acts[end.how])
        try:
            return stream.read()
        except KeyboardInterrupt:
            return None
        finally:
            self._calls.at(0, lambda: None)

    def _pass(self) -> None:
        self._now += 2.0

    def _fresh_answer(self, images: int, setting: int, questions: tuple[int, ...]) -> Fresh:
        """The answer to the last question of a chat that nothing else came between; one question is an `ask`."""
        known = images, setting, questions
        if known not in self._fresh:
            k, reduce = self.settings[setting][:2]
            chat = self.model.open(list(self.images[images])).chat(k, reduce=reduce)
            for question in questions:
                sampling = NotedSampling()
                answer = chat.ask(QUESTIONS[question], options_of(self.settings[setting], sampling))
            self._fresh[known] = answer, sampling.logits
        return self._fresh[known]


def same_answer(
    answer: Answer, logits: NDArray[np.float32], wanted: Answer, wanted_logits: NDArray[np.float32], tolerance: float
) -> None:
    """Raise AssertionError unless a complete answer and its logits [tokens, vocab] are the wanted ones."""
    assert answer.token_ids == wanted.token_ids
    assert (answer.text, answer.stopped) == (wanted.text, wanted.stopped)
    assert answer.stats.vision_tokens_kept == wanted.stats.vision_tokens_kept
    assert answer.stats.kv_slots == wanted.stats.kv_slots
    assert answer.stats.reduced == wanted.stats.reduced
    assert (answer.stats.k, answer.stats.rest) == (wanted.stats.k, wanted.stats.rest)
    assert_near(logits, wanted_logits, tolerance)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _canceller(stream: AnswerStream) -> Callable[[], None]:
    """Cancel from another thread, which is done before the call goes on."""

    def cancel() -> None:
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        thread.join()

    return cancel
