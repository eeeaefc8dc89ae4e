"""Turns that build on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.options import K, OptionKeywords, Options, combined
from vtx.runtime.api.stream import AnswerStream, AsyncAnswerStream
from vtx.runtime.checks import check_text
from vtx.runtime.prompt.messages import Message
from vtx.runtime.session.result import Selection

if TYPE_CHECKING:
    from typing import Unpack

    from vtx.runtime.api.conversation import Conversation


class Chat:
    """Turns that build on each other; K, and which image tokens stay, are the first turn's.

    `messages` are the turns so far. A turn counts once its answer is complete, not when it was cancelled or ran out of
    time.
    """

    def __init__(self, conversation: Conversation, k: K, reduce: str | None) -> None:
        self._conversation, self._k, self._reduce = conversation, k, reduce
        self.messages: list[Message] = []
        self._selection: Selection | None = None  # the question that selected the image tokens of this chat

    def __repr__(self) -> str:
        return f"<vtx.Chat, {sum(m['role'] == 'user' for m in self.messages)} turns, {self._conversation!r}>"

    def ask(self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]) -> Answer:
        """Answer the next turn; the turns before it are part of the prompt."""
        return self.stream(question, options, **keywords).read()

    def stream(self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]) -> AnswerStream:
        """As `ask`, giving the text piece by piece."""
        check_text("the question", question)
        turn: Message = {"role": "user", "content": [{"type": "text", "text": question}]}
        messages = [*self.messages, turn] if self.messages else self._conversation.opening(question)

        def completed(answer: Answer, selection: Selection | None) -> None:
            reply: Message = {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}
            self.messages, self._selection = [*messages, reply], selection

        return self._conversation.stream_messages(
            messages, self._k, combined(options, keywords), self._reduce, after=self._selection, completed=completed
        )

    async def aask(self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]) -> Answer:
        """As `ask`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
        return await self.astream(question, options, **keywords).read()

    def astream(
        self, question: str, options: Options | None = None, **keywords: Unpack[OptionKeywords]
    ) -> AsyncAnswerStream:
        """As `stream`, for `async for`."""
        return AsyncAnswerStream(self.stream(question, options, **keywords))
