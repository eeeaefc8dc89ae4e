"""Random sequences of requests to the conversations that a server keeps, each answer held against a fresh one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from hypothesis import strategies as st
from PIL import Image

from tests.support.sequences import (
    CHATS,
    QUESTIONS,
    Fresh,
    NotedSampling,
    Setting,
    noted,
    options_of,
    same_answer,
)
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Settings
from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.prompt.messages import Message
from vtx.runtime.scheduler.batching import Batching
from vtx.runtime.scheduler.conversations import ConversationPool
from vtx.runtime.session.encoded_images import ImageCache, PreparedImage

BESIDE = 3  # answers at a time
KEPT = 3  # conversations
ROUNDS = 8  # of an answer at most: its prompt, its tokens, its end
IMAGE_BYTES = 1 << 15  # of encoded images: one or two, so that they leave and come again


@dataclass(frozen=True)
class Request:
    """One request: a new question, or with `chat` that client's next turn, sent with all turns before it.

    `instead_of`: the number of images that nobody asks about again. `leaves`: the round after which its client goes,
    None: never. `late`: the answer runs out of time then instead.
    """

    question: int
    setting: int
    images: int = 0
    chat: int | None = None
    leaves: int | None = None
    late: bool = False
    reuse: bool = True
    instead_of: int | None = None


def requests(settings: int, conversations: int) -> st.SearchStrategy[list[Request]]:
    """Sequences of requests over so many settings and lists of images; a quarter of the answers is not complete."""
    request = st.builds(
        Request,
        question=st.integers(0, len(QUESTIONS) - 1),
        setting=st.integers(0, settings - 1),
        images=st.integers(0, conversations - 1),
        chat=st.none() | st.integers(0, CHATS - 1),
        leaves=st.none() | st.none() | st.none() | st.integers(0, ROUNDS - 1),
        late=st.booleans(),
        reuse=st.integers(0, 5).map(bool),
        instead_of=st.none() | st.integers(0, conversations - 1),
    )
    return st.lists(request, min_size=2, max_size=10)


@dataclass
class Running:
    """A request that is being answered."""

    request: Request
    asked: tuple[int, ...]
    conversation: Conversation
    stream: AnswerStream
    sampling: NotedSampling
    rounds: int = 0


@dataclass
class PoolSequences:
    """Requests to `model`, in rounds as the server's scheduler makes them; `alone` gives the fresh answers."""

    model: Model
    alone: Model
    images: Sequence[Sequence[Image.Image]]
    settings: Sequence[Setting]
    tolerance: float
    counts: Counter[str] = field(default_factory=Counter)
    _fresh: dict[tuple[int, int, tuple[int, ...]], Fresh] = field(default_factory=dict)
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._prepared = [self.model.loaded.images.prepare_all(list(images)) for images in self.images]
        self.batching = Batching(self.model, BESIDE, BESIDE + KEPT)
        assert self.batching.obstacle is None

    def check(self, sequence: Sequence[Request]) -> None:
        """Put the requests to a new pool; raise AssertionError where an answer is not a fresh one's."""
        pool = ConversationPool(self.model.loaded, 1 << 30, KEPT)
        self.model.loaded.caches.images = ImageCache(IMAGE_BYTES)
        opened = set[Conversation]()
        try:
            with noted(), patch("vtx.runtime.api.turns.monotonic", lambda: self._now):
                self._check(pool, sequence, opened)
        finally:
            for conversation in opened:  # a failure leaves no cache in use
                conversation.close()
        self.counts["sequences"] += 1
        self.counts["hits"] += pool.hits

    def _check(self, pool: ConversationPool, sequence: Sequence[Request], opened: set[Conversation]) -> None:
        waiting, running, turns = [*sequence], list[Running](), dict[tuple[int, int], tuple[int, ...]]()
        while waiting or running:
            self.batching.decode([one.stream for one in running])
            running = [one for one in running if self._goes_on(pool, one)]
            if waiting and len(running) < BESIDE:
                request = waiting.pop(0)
                asked: tuple[int, ...] = (request.question,)
                if request.chat is not None:
                    asked = turns[request.images, request.chat] = (
                        *turns.get((request.images, request.chat), ())[-2:],
                        request.question,
                    )
                one = self._begin(pool, request, asked)
                opened.add(one.conversation)
                if self._goes_on(pool, one):
                    running.append(one)

    def _begin(self, pool: ConversationPool, request: Request, asked: tuple[int, ...]) -> Running:
        images, setting = self._prepared[request.images], self.settings[request.setting]
        messages, sampling = self._messages(request.images, request.setting, asked), NotedSampling()
        ids = self.model.loaded.prompts.ids(messages, images)
        former = () if request.instead_of is None else self._prepared[request.instead_of]
        conversation = pool.lease(images, ids, instead_of=former) if request.reuse else pool.lease_unshared(images)
        stream = conversation.stream_messages(
            messages, Settings(setting[0], options_of(setting, sampling), setting[1]), resume=True
        )
        return Running(request, asked, conversation, stream, sampling)

    def _goes_on(self, pool: ConversationPool, one: Running) -> bool:
        """One round of an answer; False at its end."""
        if one.request.leaves == one.rounds:
            if one.request.late:
                self._now += 2.0  # for all that run
            else:
                one.stream.cancel()
        one.rounds += 1
        try:
            one.stream.step()
        except StopIteration:
            self._end(pool, one)
            return False
        return True

    def _end(self, pool: ConversationPool, one: Running) -> None:
        answer = one.stream.answer
        pool.give_back(one.conversation)
        wanted, logits = self._fresh_answer(one.request.images, one.request.setting, one.asked)
        self.counts[answer.stopped] += 1
        if answer.stopped in ("cancelled", "timeout"):
            assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)]
        else:
            same_answer(answer, one.sampling.logits, wanted, logits, self.tolerance)

    def _messages(self, images: int, setting: int, asked: Sequence[int]) -> list[Message]:
        """The turns of a chat, with the answers that fresh conversations gave."""
        messages: list[Message] = []
        for turn, question in enumerate(asked):
            text = QUESTIONS[question]
            content = text if messages else opening_parts(self._prepared[images], text)
            messages.append({"role": "user", "content": content})
            if turn + 1 < len(asked):
                answer, _ = self._fresh_answer(images, setting, tuple(asked[: turn + 1]))
                messages.append({"role": "assistant", "content": answer.text})
        return messages

    def _fresh_answer(self, images: int, setting: int, asked: tuple[int, ...]) -> Fresh:
        known = images, setting, asked
        if known not in self._fresh:
            k, reduce = self.settings[setting][:2]
            messages, sampling = self._messages(images, setting, asked), NotedSampling()
            options = replace(options_of(self.settings[setting], sampling), timeout=None)
            pictures: tuple[PreparedImage, ...] = self._prepared[images]
            with Conversation(self.alone.loaded, pictures) as conversation:
                answer = conversation.stream_messages(messages, Settings(k, options, reduce)).read()
            self._fresh[known] = answer, sampling.logits
        return self._fresh[known]
