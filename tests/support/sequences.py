"""Random sequences of questions, chats and interrupts to one conversation, each answer held against a fresh one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.chat import Chat
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.api.stream import AnswerStream

OPTIONS = Options(max_new_tokens=5, ignore_eos=True)
QUESTIONS = ("red?", "Where is the red star?", "Where is the blue circle in it?", "How many?")
CHATS = 3  # of one conversation, at most
Setting = tuple[int | str | None, str]  # K and reductions


@dataclass(frozen=True)
class Step:
    """One call: `chat` None is an independent question; `tokens` None reads the answer to its end."""

    question: int
    setting: int
    chat: int | None = None
    tokens: int | None = None  # after which the answer is interrupted


def steps(settings: int) -> st.SearchStrategy[list[Step]]:
    """Sequences of steps over so many settings; a third of the answers is interrupted."""
    step = st.builds(
        Step,
        question=st.integers(0, len(QUESTIONS) - 1),
        setting=st.integers(0, settings - 1),
        chat=st.none() | st.integers(0, CHATS - 1),
        tokens=st.none() | st.none() | st.integers(0, OPTIONS.max_new_tokens - 1),
    )
    return st.lists(step, min_size=2, max_size=8)


class Recorder:
    """A backend that notes the logits it gives, and interrupts once it has given `limit` of them."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.logits = backend, list[NDArray[np.float32]]()
        self.limit: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def head(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(self.logits) == self.limit:
            raise KeyboardInterrupt
        self.logits.append(self._backend.head(rows).copy())
        return self.logits[-1]


@dataclass
class Sequences:
    """One model and its images, with the fresh answers computed so far."""

    model: Model
    images: Sequence[Image.Image]
    settings: Sequence[Setting]
    tolerance: float
    _fresh: dict[tuple[int, tuple[int, ...]], tuple[Answer, NDArray[np.float32]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._recorder = Recorder(self.model.backend)
        self.model = Model(self.model.bundle, self._recorder, self.model.load_ms)  # type: ignore[arg-type]

    def check(self, sequence: Sequence[Step]) -> None:
        """Put the sequence to one conversation; raise AssertionError where an answer is not a fresh one's."""
        conversation = self.model.open(list(self.images))
        chats: dict[int, tuple[Chat, int, list[int]]] = {}
        for step in sequence:
            setting, before, chat = step.setting, list[int](), None
            if step.chat is not None:
                new = Chat(conversation, self.settings[setting][0], self.settings[setting][1])
                chat, setting, before = chats.setdefault(step.chat, (new, setting, []))
            self._recorder.logits.clear()
            self._recorder.limit = step.tokens
            stream = self._stream(conversation, chat, setting, step.question)
            try:
                answer = stream.read()
            except KeyboardInterrupt:
                continue
            finally:
                self._recorder.limit = None
            before.append(step.question)
            self._compare(answer, np.concatenate(self._recorder.logits), setting, before)

    def _stream(self, conversation: Conversation, chat: Chat | None, setting: int, question: int) -> AnswerStream:
        if chat is not None:
            return chat.stream(QUESTIONS[question], OPTIONS)
        k, reduce = self.settings[setting]
        return conversation.stream(QUESTIONS[question], k, OPTIONS, reduce=reduce)

    def _compare(self, answer: Answer, logits: NDArray[np.float32], setting: int, questions: Sequence[int]) -> None:
        wanted, wanted_logits = self._fresh_answer(setting, tuple(questions))
        assert answer.token_ids == wanted.token_ids
        assert answer.stats.vision_tokens_kept == wanted.stats.vision_tokens_kept
        assert answer.stats.kv_slots == wanted.stats.kv_slots
        assert answer.stats.reduced == wanted.stats.reduced
        assert answer.stats.k == wanted.stats.k
        np.testing.assert_allclose(logits, wanted_logits, atol=self.tolerance, rtol=0)

    def _fresh_answer(self, setting: int, questions: tuple[int, ...]) -> tuple[Answer, NDArray[np.float32]]:
        """The answer to the last question of a chat that nothing else came between; one question is an `ask`."""
        known = setting, questions
        if known not in self._fresh:
            chat = self.model.open(list(self.images)).chat(self.settings[setting][0], reduce=self.settings[setting][1])
            for question in questions:
                self._recorder.logits.clear()
                answer = chat.ask(QUESTIONS[question], OPTIONS)
            self._fresh[known] = answer, np.concatenate(self._recorder.logits)
        return self._fresh[known]
