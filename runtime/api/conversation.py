"""Questions about the same images, whose part of the caches is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.answering import AnswerInProgress, Caches, Question
from vtx.runtime.api.chat import Chat
from vtx.runtime.api.options import DEFAULT, K, OptionKeywords, Options, combined
from vtx.runtime.api.stream import AnswerStream, AsyncAnswerStream
from vtx.runtime.api.turns import Request, Turns
from vtx.runtime.checks import check_text
from vtx.runtime.policies.make import check_video_policy
from vtx.runtime.policies.policy import Policy
from vtx.runtime.prompt.messages import PICTURES, Message, Part
from vtx.runtime.session.encoded_images import EncodedImages, PreparedImage
from vtx.runtime.session.result import Selection
from vtx.runtime.session.session import Session

if TYPE_CHECKING:
    from typing import Unpack

    from vtx.runtime.api.model import Model


def opening_parts(images: Sequence[PreparedImage], question: str) -> list[Part]:
    """The content of a first question: images and videos, then the words."""
    pictures: list[Part] = [{"type": "video"} if image.kind == "video" else {"type": "image"} for image in images]
    return [*pictures, {"type": "text", "text": question}]


def _forget(_: Answer, __: Selection | None) -> None:
    """An independent question leaves nothing to remember."""


class Conversation:
    """Questions about the same images. The images' part of the caches is computed once and reused.

    `ask` and `stream` put independent questions; `chat` starts a conversation that remembers its turns.

    One answer is computed at a time. Calls of `ask` from several threads wait for each other. A stream holds the
    conversation until its end: what its own reader asks next ends it, as `cancel()` from any thread does; other
    threads get a `ConversationBusyError` at once. For answers side by side open the image once for each thread.
    """

    def __init__(
        self,
        model: Model,
        images: tuple[PreparedImage, ...],
        system: str | None = None,
        *,
        shares_images: bool = True,
    ) -> None:
        """`shares_images`: take images from the model's `image_cache`, where it has one, and leave them there."""
        if system is not None:
            check_text("system", system)
        self.model, self.images, self.system = model, images, system
        self._shares_images = shares_images
        self._caches = self._empty_caches()
        self._turns = Turns()
        model.register(self)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kinds: list[str] = [image.kind for image in self.images]
        counts = [f"{count} {kind}{'' if count == 1 else 's'}" for kind in PICTURES if (count := kinds.count(kind))]
        return f"<vtx.Conversation about {' and '.join(counts) or '0 images'} with {self.model.manifest.model.name}>"

    def close(self) -> None:
        """End a running answer and free the caches. The conversation can be used again and then starts afresh."""
        with self._turns.close():
            self._caches = self._empty_caches()

    def ask(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> Answer:
        """Answer one question, independent of those before it.

        Args:
            question: plain text; special tokens in it stay text.
            k: a prebuilt K, "none" or None for no withdrawal; the bundle's default when left out.
            options: sampling and limits.
            reduce: a spec of reductions, as "mustdrop:192"; "none" or None for none; the bundle's first when left out.
            keywords: fields of `Options` and `Sampling`, as `max_new_tokens=64, temperature=0.7`; they win over
                `options`.

        Raises:
            RequestError: an empty question, a wrong option, a K the bundle was not cut at, a reduction it was not
                exported for.
            ContextError: the question does not fit.
            ConversationBusyError: another thread reads a stream of this conversation.

        """
        return self.stream(question, k, options, reduce=reduce, **keywords).read()

    def stream(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> AnswerStream:
        """As `ask`, giving the text piece by piece."""
        return self.stream_messages(self.opening(question), k, combined(options, keywords), reduce)

    async def aask(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> Answer:
        """As `ask`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
        return await self.astream(question, k, options, reduce=reduce, **keywords).read()

    def astream(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> AsyncAnswerStream:
        """As `stream`, for `async for`."""
        return AsyncAnswerStream(self.stream(question, k, options, reduce=reduce, **keywords))

    def chat(self, k: K = DEFAULT, *, reduce: str | None = DEFAULT) -> Chat:
        """A conversation of several turns about these images.

        Raises:
            RequestError: a K the bundle was not cut at, a reduction it was not exported for.

        """
        self._policy(k, None, reduce)
        return Chat(self, k, reduce)

    def opening(self, question: str) -> list[Message]:
        """The messages of a first question: the system prompt, if there is one, the images, and the question."""
        check_text("the question", question)
        parts = opening_parts(self.images, question)
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": parts}]

    def stream_messages(
        self,
        messages: Sequence[Message],
        k: K,
        options: Options,
        reduce: str | None,
        *,
        after: Selection | None = None,
        completed: Callable[[Answer, Selection | None], None] = _forget,
    ) -> AnswerStream:
        """The answer to any messages about these images; what cannot be asked is refused here, not when it is read."""
        model = self.model
        model.check_open()
        policy = self._policy(k, options, reduce)
        ids = model.prompt_ids(messages, self.images)
        if not policy.entries:  # these leave out image tokens before the decoder
            model.check_room(ids, self.images)
        question = Question(messages, ids, policy, options, after)
        return AnswerStream(AnswerInProgress(model, question, self._lease, completed))

    def resume_messages(self, messages: Sequence[Message], k: K, options: Options, reduce: str | None) -> AnswerStream:
        """As `stream_messages`, starting from what the caches hold of these messages; the same answer as without.

        Where the question decides which image tokens stay, only the images' part is reused.
        """
        fixed = self.model.policy(k, options, reduce).fixed
        after = self._caches.session.selection if fixed else None
        return self.stream_messages(messages, k, options, reduce, after=after)

    def _policy(self, k: K, options: Options | None, reduce: str | None) -> Policy:
        policy = self.model.policy(k, options, reduce)
        if any(image.kind == "video" for image in self.images):
            check_video_policy(policy)
        return policy

    def agreement(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """How many leading tokens of a prompt the caches hold, and how many they hold in all."""
        return self._caches.session.agreement(ids)

    @property
    def cache_bytes(self) -> int:
        """Bytes that its caches take: K and V, filled or not, and encoded images."""
        caches = self._caches
        return caches.session.kv_slots * self.model.backend.kv_slot_bytes + caches.images.bytes

    @contextmanager
    def _lease(self, request: Request) -> Iterator[Caches]:
        with self._turns.hold(request):
            self.model.check_open()
            yield self._caches

    def _empty_caches(self) -> Caches:
        backend = self.model.backend
        images = EncodedImages(backend, self.images, self.model.image_cache if self._shares_images else None)
        return Caches(Session(backend, self.model.manifest), images)
