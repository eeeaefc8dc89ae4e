"""An answer as it comes: an iterator over pieces of text, for threads and for asyncio."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.api.answering import AnswerInProgress
from vtx.runtime.api.turns import Reader
from vtx.runtime.errors import RequestError
from vtx.runtime.session.session import Session

T = TypeVar("T")


class AnswerStream:
    """An iterator over pieces of text; `answer` is available once it is exhausted.

    It holds its conversation from its first piece to its end. Its reader's next question in the same conversation ends
    it, as `cancel` does: `answer` is then the part so far, with `stopped` "cancelled".
    """

    def __init__(self, answering: AnswerInProgress) -> None:
        self._answering = answering
        self._pieces = answering.pieces()
        self._lock = threading.Lock()
        self.reader: Reader | None = None  # None: the thread that reads
        answering.stream = weakref.ref(self)

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> str:
        while not (piece := self.step()):
            pass
        return piece

    def step(self) -> str:
        """Compute the prompt with its first token, or one more token; return the text that is now final, maybe none.

        For programs that interleave several answers. Raises StopIteration at the end, like `next`.
        """
        self._answering.reader = self.reader or threading.current_thread()
        try:
            with self._lock:
                return next(self._pieces)
        finally:
            if self._answering.cancelled:
                self._close()

    @contextmanager
    def paused(self) -> Iterator[Session | None]:
        """Its session if it waits for what it has `to_run`, another token or the end of its prompt, else None.

        It stays there until the end of the block: a cancellation meanwhile ends its next step.
        """
        with self._lock:
            session = self._answering.session
            ready = session is not None and session.to_run and not self._answering.cancelled
            yield session if ready else None

    def join_prompts(self) -> None:
        """Let the first step end before the last part of its prompt, if that is text alone and not long.

        A pass of several streams may run it then, or the next step does.
        """
        self._answering.joins_prompts = True

    @property
    def waiting(self) -> int:
        """The tokens of its prompt that wait for such a pass."""
        session = self._answering.session
        return 0 if session is None else len(session.waiting)

    @property
    def answering(self) -> AnswerInProgress:
        """The answer that it makes, for a stream of several."""
        return self._answering

    @property
    def timeout(self) -> float | None:
        """Seconds that the answer may take from its first step on; None: as many as it needs."""
        return self._answering.timeout

    def on_progress(self, beat: Callable[[], None]) -> None:
        """Call `beat`, in the thread that computes, before each view of an image, stage and token."""
        self._answering.beat = beat

    def progress(self, start: int = 0) -> Progress:
        """The tokens so far from number `start` on.

        For the thread that reads; a piece of text can take several tokens.
        """
        return self._answering.progress(start)

    @property
    def thought(self) -> str:
        """The text so far of the thought before the answer, which is none of the pieces."""
        return self._answering.thought

    def __repr__(self) -> str:
        answer = self._answering.answer
        return f"<vtx.AnswerStream, {f'stopped: {answer.stopped}' if answer else 'not read to its end'}>"

    @property
    def running(self) -> bool:
        """True while some thread computes the next piece."""
        return self._lock.locked()

    @property
    def answer(self) -> Answer:
        """The complete answer.

        Raises:
            RequestError: the stream has not been read to its end, or an error ended it.

        """
        answer = self._answering.answer
        if answer is None:
            raise RequestError("the answer is not complete; read its stream to the end first")
        return answer

    def cancel(self) -> None:
        """End the answer, from any thread: within one token, or before the prompt's next stage.

        Its reader sees the iteration end. The conversation is free for the next question.
        """
        self._answering.cancel()
        self._close()

    close = cancel

    def read(self) -> Answer:
        """Run to the end and return the answer."""
        self._answering.returns_by_itself = True
        with suppress(StopIteration):
            while True:
                self.step()
        return self.answer

    def _close(self) -> None:
        """End a paused stream. A running one checks by itself if it was cancelled."""
        if self._lock.acquire(blocking=False):
            try:
                if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CREATED:
                    self._answering.end("cancelled")
                self._pieces.close()
            finally:
                self._lock.release()


class AsyncAnswerStream:
    """An asynchronous iterator over pieces of text; `answer` is available once it is exhausted.

    The engine runs in a thread of the event loop's default executor. Cancelling the task cancels the answer.
    """

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> str:
        piece = await _in_thread(self._stream, lambda: next(self._stream, None))
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __repr__(self) -> str:
        return repr(self._stream).replace("AnswerStream", "AsyncAnswerStream")

    @property
    def answer(self) -> Answer:
        """The complete answer. Raises RequestError before the end."""
        return self._stream.answer

    def cancel(self) -> None:
        """End the answer, from any thread or task."""
        self._stream.cancel()

    async def read(self) -> Answer:
        """Run to the end and return the answer."""
        return await _in_thread(self._stream, self._stream.read)


async def _in_thread(stream: AnswerStream, call: Callable[[], T]) -> T:
    """Run a call of the stream in another thread. It has ended when this returns, cancelled or not."""
    import asyncio  # a program without it need not wait for asyncio and ssl to load

    stream.reader = asyncio.current_task()
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stream.cancel()
        await asyncio.wait([future])
        raise
