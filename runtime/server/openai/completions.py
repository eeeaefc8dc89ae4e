"""OpenAI's older completions: a prompt that no chat template prints, and the text after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.prompt.messages import texts_of
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.fields import THOUGHTS, WHERE, FieldReader, RawPrompts, at, check_absent
from vtx.runtime.server.openai.objects import FINISHED, Event, Objects
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.strict import optional

MAX_TOKENS = 16  # when left out, as OpenAI's


@dataclass(frozen=True, slots=True)
class Tokens:
    """A request of /detokenize."""

    tokens: tuple[int, ...]
    model: str = optional("")


def chat_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /v1/completions."""
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, **body}
    check_absent(fields, ("messages", "tools", "tool_choice", *THOUGHTS))
    prompts = _prompts(fields.pop("prompt", None), reader)
    echo = reader.value(bool, fields.pop("echo", False), at("echo"))
    if echo and "logprobs" in fields:
        raise Refusal(
            400,
            "echo and logprobs are given, and tokens of prompts have no log probabilities here; leave one out",
            code="unsupported_value",
            param="echo",
        )
    count = fields.pop("logprobs", None)
    if isinstance(count, bool) or not isinstance(count, int | None):
        raise Refusal(
            400, f"logprobs is {count!r:.40}; it must be a whole number", code="invalid_value", param="logprobs"
        )
    known = {} if count is None else {"logprobs": True, "top_logprobs": count}
    return {**fields, **known, "messages": RawPrompts(*prompts, echo=echo)}


def _prompts(given: Any, reader: FieldReader) -> Sequence[str | tuple[int, ...]]:
    """One or several prompts, each a text or token ids."""
    if isinstance(given, list) and given and type(given[0]) is int:
        return [reader.value(tuple[int, ...], given, at("prompt"))]
    prompts: str | Sequence[str | tuple[int, ...]]
    prompts = reader.value(str | tuple[str | tuple[int, ...], ...], given, at("prompt"))
    return [prompts] if isinstance(prompts, str) else prompts


def token_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /detokenize."""
    fields = reader.read(Tokens, body, WHERE)
    return {"model": fields.model, "messages": RawPrompts(fields.tokens)}


def tokenized_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /tokenize: one's own, or a text as `prompt` or `content`."""
    texts = [name for name in ("prompt", "content") if name in body]
    if not texts:
        return body
    check_absent(body, ("messages", *THOUGHTS, *texts[1:]))
    text = reader.value(str, body[texts[0]], at(texts[0]))
    return {name: value for name, value in body.items() if name not in texts} | {"messages": RawPrompts(text)}


class CompletionObjects(Objects):
    """The objects of one completion."""

    prefix: ClassVar[str] = "cmpl-"

    def whole(self, answers: Sequence[Answer]) -> Event:
        choices = [
            self._choice(n, self._echoed(n) + one.text, one, FINISHED[one.stopped]) for n, one in enumerate(answers)
        ]
        usage = self.usage(answers)
        return {**self.head("text_completion"), "choices": choices, "usage": usage, **self.timings(answers)}

    def begin(self, index: int) -> Iterator[Event]:
        if text := self._echoed(index):
            yield {**self.head("text_completion"), "choices": [self._choice(index, text, Progress(()), None)]}

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        yield {**self.head("text_completion"), "choices": [self._choice(index, piece.text, piece.progress, None)]}

    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        last = self._choice(index, "", Progress(()), FINISHED[answer.stopped])
        yield {**self.head("text_completion"), "choices": [last], **self.timings([answer])}

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        if self.request.include_usage:
            yield {**self.head("text_completion"), "choices": [], "usage": self.usage(answers)}

    def _echoed(self, index: int) -> str:
        """The prompt of an answer if it stands before it, else nothing."""
        prompt = self.request.prompt_of(index)[0]
        if not self.request.echo:
            return ""
        return self.model.loaded.text.raw(prompt["ids"]) if "ids" in prompt else "".join(texts_of(prompt))

    def _choice(self, index: int, text: str, source: Answer | Progress, finish: str | None) -> Event:
        known = self.logprobs(source, index)
        logprobs = (
            None
            if known is None
            else {
                "tokens": [one["token"] for one in known],
                "token_logprobs": [one["logprob"] for one in known],
                # The chosen token is among them, as in OpenAI's replies, so that there may be one more than asked for.
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in (*one["top_logprobs"], one)} for one in known
                ],
                "text_offset": self.token_texts(index).offsets[-len(known) :] if known else [],
            }
        )
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
