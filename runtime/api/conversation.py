"""Questions about the same images, whose part of the caches is computed once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.answering import AnswerInProgress
from vtx.runtime.api.boxes import check_boxes
from vtx.runtime.api.images import ImageReader, Images
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.options import DEFAULT, K, OptionKeywords, Options, QuestionKeywords, Settings, combined
from vtx.runtime.api.prompts import opening_messages
from vtx.runtime.api.question import Question
from vtx.runtime.api.room import check_room
from vtx.runtime.api.stream import AnswerStream, AsyncAnswerStream
from vtx.runtime.api.turns import Ended, Request, Turns
from vtx.runtime.checks import check_text
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.prompt.messages import PICTURES, Message, with_schema, with_tools
from vtx.runtime.session.encoded_images import EncodedImages, PreparedImage
from vtx.runtime.session.session import Selection, Session

if TYPE_CHECKING:
    from typing import Unpack

    from vtx.runtime.bundle.spec.manifest import Manifest
    from vtx.runtime.session.caches import PrefixCaches
    from vtx.runtime.vision.layout import ImageDetail

log = logging.getLogger(__name__)


class Conversation:
    """Questions about the same images. The images' part of the caches is computed once and reused.

    `ask` and `stream` answer independent questions; `chat` starts a conversation that remembers its turns.

    One answer is computed at a time. Calls of `ask` from several threads wait for each other. A stream holds the
    conversation until its end: the next question of its own reader ends it, as `cancel()` from any thread does; other
    threads get a `ConversationBusyError` at once. For concurrent answers, open the image once per thread.
    """

    _encoded: EncodedImages

    def __init__(
        self,
        loaded: LoadedBundle,
        images: tuple[PreparedImage, ...],
        system: str | None = None,
        *,
        shares_images: bool = True,
        prefix_file: Path | None = None,
        tenant: str = "",
    ) -> None:
        """`shares_images`: use what the bundle's `image_cache` and `tile_cache` have of the `tenant`, if it has them.

        Raises RequestError: a `prefix_file` serves no prompt of the model.
        """
        model = loaded.manifest.model
        if prefix_file is not None and (model.two_way == "prompt" or model.conv_layers):
            raise RequestError(
                "a prompt of this model cannot be continued from some token on, since tokens see those behind them, or "
                "layers keep a state; leave the prefix file out"
            )
        if system is not None:
            check_text("system", system)
        self.loaded = loaded
        self.images = images
        self.system = system
        self.tenant = tenant
        self.reader: ImageReader | None = None  # reads its images again, with other tokens
        self._shares_images = shares_images
        self._prefix_file = prefix_file
        self._turns = Turns()
        self._forget()
        loaded.conversations.add(self)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kinds: list[str] = [image.kind for image in self.images]
        counts = [f"{count} {kind}{'' if count == 1 else 's'}" for kind in PICTURES if (count := kinds.count(kind))]
        return f"<vtx.Conversation about {' and '.join(counts) or '0 images'} with {self.loaded.manifest.model.name}>"

    def close(self) -> None:
        """Stop a running answer and free the caches. If used again, the conversation starts from scratch."""
        with self._turns.hold(Request(), closing=True):
            self._forget()

    def replace(self, images: Images, *, fit: str | None = None, image_tokens: ImageDetail = None) -> None:
        """Ask about other images from now on, e.g. the next frame of a camera; the arguments are as in `open`.

        A running answer is stopped. The cached prompt is reused up to the first token that differs. Earlier chats
        cannot be continued.
        """
        self._reread(self.loaded.images.reader(images, fit), image_tokens)

    def _reread(self, reader: ImageReader, image_tokens: ImageDetail) -> None:
        """Ask about what the reader gives from now on."""
        self.replace_prepared(reader(image_tokens))
        self.reader = reader

    def replace_prepared(self, images: tuple[PreparedImage, ...]) -> None:
        """As `replace`, by images that are read already."""
        with self._turns.hold(Request(), closing=True):
            self.reader = None
            self.images = images
            self._encoded = self._encoded.replaced(images)

    def ask(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        image_tokens: ImageDetail = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> Answer:
        """Answer one question, independent of those before it.

        Args:
            question: plain text; special tokens in it stay text.
            k: a prebuilt K, "none" or None for no withdrawal, "auto" for the gates, "card" for that of the bundle's
                card for the kind of answer; the bundle's default when left out.
            options: sampling and limits.
            image_tokens: as in `open`, from now on.
            keywords: fields of `Options` and `Sampling`, e.g. `max_new_tokens=64, temperature=0.7`, which override
                `options`; and `reduce`, a spec of reductions such as "mustdrop:192", "none" or None for none; default:
                the bundle's first.

        Raises:
            RequestError: an empty question, a wrong option, a K or a reduction that the bundle was not exported for.
            ContextError: the question does not fit into the context.
            ConversationBusyError: another thread reads a stream of this conversation.

        """
        return self.stream(question, k, options, image_tokens=image_tokens, **keywords).read()

    def stream(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        image_tokens: ImageDetail = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> AnswerStream:
        """Like `ask`, but yield the text piece by piece."""
        settings = Settings.of(k, options, keywords)
        if image_tokens is not None:
            if self.reader is None:
                raise RequestError("image_tokens is for images as they were opened; give it to replace or open")
            self._reread(self.reader, image_tokens)
        return self.stream_messages(self.opening(question), settings)

    async def aask(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        image_tokens: ImageDetail = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> Answer:
        """Like `ask`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
        return await self.astream(question, k, options, image_tokens=image_tokens, **keywords).read()

    def astream(
        self,
        question: str,
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        image_tokens: ImageDetail = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> AsyncAnswerStream:
        """Like `stream`, for `async for`."""
        return AsyncAnswerStream(self.stream(question, k, options, image_tokens=image_tokens, **keywords))

    def chat(self, k: K = DEFAULT, *, reduce: str | None = DEFAULT) -> Chat:
        """Start a conversation of several turns about these images.

        Raises:
            RequestError: a K or a reduction that the bundle was not exported for.

        """
        self.loaded.policy(k, None, reduce, self.images)
        return Chat(self, k, reduce)

    def opening(self, question: str) -> list[Message]:
        """The messages of a first question: system prompt (if any), images and question."""
        check_text("the question", question)
        return opening_messages(self.system, self.images, question)

    def stream_messages(
        self,
        messages: Sequence[Message],
        settings: Settings,
        *,
        resume: bool = False,
        after: Selection | None = None,
        completed: Callable[[Answer, Selection | None], None] | None = None,
    ) -> AnswerStream:
        """The answer to any messages about these images; what cannot be asked is refused here, not when it is read.

        With `resume` it starts from the part of these messages that the caches hold, and is the same answer as without;
        if the question decides which image tokens stay, only the images' part is reused.
        """
        loaded = self.loaded
        images = self.images
        loaded.conversations.check_open()
        options = settings.options
        guide = options.guide
        messages = with_tools(messages, [], options.thinking)
        loaded.prompts.check_thinking(messages, options)
        if guide is not None and guide.fill:
            from vtx.runtime.api.filling import FillingStream

            free = partial(self.stream_messages, resume=resume)
            return FillingStream(free, messages, settings, after=after, completed=completed)
        policy = loaded.policy(settings.k, settings.options, settings.reduce, images)
        if settings.options.boxes:
            check_boxes(loaded.manifest, images)
        if settings.options.prompt_logprobs is not None:
            _check_scored(loaded.manifest, later=after is not None and not policy.fixed)
        if guide is not None and guide.schema_in_prompt:
            messages = with_schema(messages, str(guide.schema))
        if guide is not None and guide.tools is not None and "tools" not in messages[0]:
            messages = with_tools(messages, guide.listed_tools)
        ids = loaded.prompts.ids(messages, images)
        if not policy.entries:  # these leave out image tokens before the decoder
            check_room(loaded, ids, images)
        if resume and policy.fixed:
            after = self._session.selection
        question = Question(messages, ids, policy, settings.options, after)
        return AnswerStream(AnswerInProgress(loaded, question, partial(self._lease, images), completed))

    def agreement(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """The number of leading tokens of a prompt that the caches hold, and of all that they hold."""
        return self._session.agreement(ids)

    def share_prefix(self, other: Conversation) -> None:
        """Begin with what another conversation about the same images, which computes nothing now, has of their prefix.

        Its system text and images are encoded and in the caches then, as far as they are there.
        """
        self._session.caches.copy_prefix(other.prefix_caches)

    @property
    def prefix_caches(self) -> PrefixCaches:
        """Its caches with the prefix in them, for a conversation that copies it."""
        return self._session.caches

    @property
    def cache_bytes(self) -> int:
        """Bytes of memory that it takes: K and V that were filled, in blocks of 32 slots, states, and encoded images.

        Shared blocks count in part.
        """
        kv = self._session.kv_slots * self.loaded.backend.kv_slot_bytes
        return kv + self._session.state_bytes + self._encoded.bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that it reads."""
        return self._session.kv_slots_held * self.loaded.backend.kv_slot_bytes

    @contextmanager
    def _lease(self, images: tuple[PreparedImage, ...], request: Request) -> Iterator[tuple[Session, EncodedImages]]:
        with self._turns.hold(request):
            self.loaded.conversations.check_open()
            if images is not self.images:  # they were replaced before the answer began
                raise Ended("cancelled")
            session = self._session
            unread = self._prefix_file is not None and not self._session.caches.segments
            if unread:
                self._read_prefix(session.caches)
            yield session, self._encoded
            if unread:
                self._write_prefix(session.caches)

    def _read_prefix(self, caches: PrefixCaches) -> None:
        from vtx.runtime.session.prefix_file import load_prefix

        assert self._prefix_file is not None
        if self._prefix_file.exists():
            try:
                load_prefix(self._prefix_file, self.loaded.bundle, self.loaded.backend, caches)
            except VtxError as e:
                log.warning("%s", e)

    def _write_prefix(self, caches: PrefixCaches) -> None:
        """Write the file unless it had all of this prompt's beginning."""
        from vtx.runtime.session.prefix_file import beginning, save_prefix

        assert self._prefix_file is not None
        if caches.common < beginning(caches.prefix):
            try:
                save_prefix(self._prefix_file, self.loaded.bundle, self.loaded.backend, caches)
            except VtxError as e:
                log.warning("%s", e)

    def _forget(self) -> None:
        """Begin with empty caches."""
        loaded = self.loaded
        self._session = Session(loaded.backend, loaded.manifest)
        shared = (loaded.caches.images, loaded.caches.tiles) if self._shares_images else (None, None)
        self._encoded = EncodedImages(loaded.backend, self.images, *shared, self.tenant)


class Chat:
    """A conversation with memory. All turns have its K; the first one, or with a rest each, determines the image tokens
    that remain.

    `messages` are the turns so far. A turn counts once its answer is complete, not when it was cancelled or ran out of
    time.
    """

    def __init__(self, conversation: Conversation, k: K, reduce: str | None) -> None:
        self._conversation = conversation
        self._k = k
        self._reduce = reduce
        self._images = conversation.images
        self.messages: list[Message] = []
        self._about: str | None = None
        self._selection: Selection | None = None  # the question that selected the image tokens of this chat

    def __repr__(self) -> str:
        return f"<vtx.Chat, {sum(m['role'] == 'user' for m in self.messages)} turns, {self._conversation!r}>"

    def ask(self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]) -> Answer:
        """Answer the next turn; the turns before it are part of the prompt."""
        return self.stream(question, options, **keywords).read()

    def stream(self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]) -> AnswerStream:
        """Like `ask`, but yield the text piece by piece."""
        check_text("the question", question)
        if self._conversation.images is not self._images:
            raise RequestError("the images of this chat were replaced; start another one with chat()")
        turn: Message = {"role": "user", "content": [{"type": "text", "text": question}]}
        messages = [*self.messages, turn] if self.messages else self._conversation.opening(question)

        given = combined(options, keywords)
        if given.guide is not None and given.guide.tools is not None:
            raise RequestError("a chat has no place for the results of tools; give messages to generate of the model")
        if self.messages and given.about not in (None, self._about):
            raise RequestError(
                "about is the first turn's, whose image tokens stay; leave it out, or start another chat"
            )
        about = self._about if self.messages else given.about
        settings = Settings(self._k, replace(given, about=about), self._reduce)

        def completed(answer: Answer, selection: Selection | None) -> None:
            reply: Message = {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}
            self.messages = [*messages, reply]
            self._selection = selection
            self._about = about

        return self._conversation.stream_messages(messages, settings, after=self._selection, completed=completed)

    async def aask(self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]) -> Answer:
        """Like `ask`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
        return await self.astream(question, options, **keywords).read()

    def astream(
        self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]
    ) -> AsyncAnswerStream:
        """Like `stream`, for `async for`."""
        return AsyncAnswerStream(self.stream(question, options, **keywords))


def _check_scored(manifest: Manifest, *, later: bool) -> None:
    """Raise RequestError if tokens of a prompt have no log probabilities here; `later`: it is a chat's later turn."""
    problem = ""
    if manifest.model.two_way == "prompt":
        problem = f"the tokens of a prompt of {manifest.model.name} see those behind them"
    elif not all(stage.keeps for stage in manifest.stages):
        problem = f"{manifest.model.name} computes only the last token of a prompt in its last layers"
    elif later:
        problem = "an earlier question of this chat determines which image tokens stay"
    if problem:
        raise RequestError(f"prompt_logprobs: {problem}, so it has no log probabilities; leave prompt_logprobs out")
