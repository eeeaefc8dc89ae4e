"""OpenAI's older completions: a prompt that no chat template prints, and the text after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.fields import FieldReader, RawPrompt, at, check_absent
from vtx.runtime.server.openai.objects import FINISHED, Event, Objects
from vtx.runtime.server.refusal import Refusal

MAX_TOKENS = 16  # when left out, as OpenAI's


def chat_fields(body: dict[str, Any], _: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /v1/completions."""
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, **body}
    prompt = fields.pop("prompt", None)
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str):
        raise Refusal(400, "prompt must be a string; send one a request", code="invalid_value", param="prompt")
    check_absent(fields, ("messages", "tools", "tool_choice"))
    count = fields.pop("logprobs", None)
    if isinstance(count, bool) or not isinstance(count, int | None):
        raise Refusal(
            400, f"logprobs is {count!r:.40}; it must be a whole number", code="invalid_value", param="logprobs"
        )
    known = {} if count is None else {"logprobs": True, "top_logprobs": count}
    return {**fields, **known, "messages": RawPrompt(prompt)}


def tokenized_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /tokenize: one's own, or a text as `prompt` or `content`."""
    texts = [name for name in ("prompt", "content") if name in body]
    if not texts:
        return body
    check_absent(body, ("messages", *texts[1:]))
    text = reader.value(str, body[texts[0]], at(texts[0]))
    return {name: value for name, value in body.items() if name not in texts} | {"messages": RawPrompt(text)}


class CompletionObjects(Objects):
    """The objects of one completion."""

    prefix: ClassVar[str] = "cmpl-"

    def whole(self, answers: Sequence[Answer]) -> Event:
        choices = [self._choice(n, one.text, one, FINISHED[one.stopped]) for n, one in enumerate(answers)]
        return {**self.head("text_completion"), "choices": choices, "usage": self.usage(answers)}

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        yield {**self.head("text_completion"), "choices": [self._choice(index, piece.text, piece.progress, None)]}

    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        last = self._choice(index, "", Progress(()), FINISHED[answer.stopped])
        yield {**self.head("text_completion"), "choices": [last]}

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        if self.request.include_usage:
            yield {**self.head("text_completion"), "choices": [], "usage": self.usage(answers)}

    def _choice(self, index: int, text: str, source: Answer | Progress, finish: str | None) -> Event:
        known = self.logprobs(source, index)
        logprobs = None if known is None else {
            "tokens": [one["token"] for one in known], "token_logprobs": [one["logprob"] for one in known],
            "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in known],
            "text_offset": self.token_texts(index).offsets[-len(known) :] if known else [],
        }  # fmt: skip
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
