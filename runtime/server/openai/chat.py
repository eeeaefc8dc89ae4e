"""The objects of OpenAI's chat completions: whole, and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from vtx.runtime.api.answer import Answer
from vtx.runtime.prompt.tools import ToolCall
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.objects import FINISHED, Event, Objects, call_id


class ChatObjects(Objects):
    """The objects of one chat completion."""

    prefix: ClassVar[str] = "chatcmpl-"

    def whole(self, answers: Sequence[Answer]) -> Event:
        choices = list[Event]()
        for index, answer in enumerate(answers):
            parts = self.divided(answer.text)
            known = self.logprobs(answer, index)
            message: Event = {"role": "assistant", "content": parts.content, "refusal": None}
            message |= {} if answer.thought is None else {"reasoning_content": answer.thought}
            if parts.calls:
                calls = [_function(call) | {"id": call_id(), "type": "function"} for call in parts.calls]
                message |= {"content": parts.content or None, "tool_calls": calls}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": _finish(answer, parts.calls),
                    "logprobs": None if known is None else {"content": known, "refusal": None},
                }
            )
        usage = self.usage(answers)
        return {**self.head("chat.completion"), "choices": choices, "usage": usage, **self.timings(answers)}

    def begin(self, index: int) -> Iterator[Event]:
        self.parts[index] = self.divided()
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        known = self.logprobs(piece.progress, index) if piece.progress.token_ids else None
        thought = [{"reasoning_content": piece.thought}] if piece.thought else []
        for delta in [*thought, *self._deltas(index, piece.text)] or ([{"content": ""}] if known else []):
            yield self._chunk(index, delta, known)
            known = None

    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        for delta in self._deltas(index, "", complete=True):
            yield self._chunk(index, delta)
        yield self._chunk(index, {}, finish=_finish(answer, self.parts[index].calls)) | self.timings([answer])

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        if self.request.include_usage:
            yield {**self.head("chat.completion.chunk"), "choices": [], "usage": self.usage(answers)}

    def _deltas(self, index: int, text: str, *, complete: bool = False) -> Iterator[Event]:
        content, calls = self.parts[index].push(text, complete=complete)
        if content:
            yield {"content": content}
        for number, call in calls:
            begin = {"id": call_id(), "type": "function"} if call.name else {}
            yield {"tool_calls": [{"index": number, **begin, **_function(call)}]}

    def _chunk(
        self, index: int, delta: Event, known: list[Mapping[str, Any]] | None = None, finish: str | None = None
    ) -> Event:
        logprobs = None if known is None else {"content": known, "refusal": None}
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return {**self.head("chat.completion.chunk"), "choices": [choice]}


def _function(call: ToolCall) -> Event:
    return {
        "function": {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
    }


def _finish(answer: Answer, calls: Sequence[ToolCall]) -> str:
    return "tool_calls" if calls and answer.stopped == "end" else FINISHED[answer.stopped]
