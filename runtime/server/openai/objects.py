"""The part that the objects of all replies share: token counts, log probabilities, calls of tools as they come."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.api.model import Model
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tools import CallForm, ToolCall
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.request import ChatRequest

FINISHED = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "timeout": "length"}
Event = dict[str, Any]


class TokenTexts:
    """The tokens of an answer as it comes, as parts of its text. `offsets`: the characters before each."""

    def __init__(self, text: Text, begun: Sequence[int]) -> None:
        """`begun`: tokens that the answer continues; the text of others begins with the first that is no blank."""
        self._text = text
        self._stream = text.stream()
        self._begun = bool(begun)
        for id in begun:
            self._stream.push(id)
        self._length = 0
        self._pending = b""  # of characters that are not certain yet
        self.offsets = list[int]()

    def of(self, id: int) -> bytes:
        """The bytes of a token in this place."""
        part = self._text.bytes_of(id)
        return part if self._begun else part.lstrip()

    def push(self, id: int) -> None:
        """The answer has this token next."""
        certain = getincrementaldecoder("utf-8")("replace").decode(self._pending)
        self.offsets.append(self._length + len(certain))
        self._pending += self.of(id)
        piece = self._stream.push(id)
        piece = piece if self._begun else piece.lstrip()
        if piece:
            self._length += len(piece)
            self._pending = b""
        self._begun = self._begun or bool(piece or self._pending)


class Parts:
    """The text of an answer as it comes, divided into content and calls. `form` is None if it has no calls."""

    def __init__(self, form: CallForm | None) -> None:
        self._form = form
        self._text = ""
        self.content = ""
        self.calls = list[ToolCall]()

    def push(self, text: str, *, complete: bool = False) -> tuple[str, list[tuple[int, ToolCall]]]:
        """The new content, and of each call that grew its number and its new part, with the name at its beginning."""
        self._text += text
        if self._form is None:
            self.content = self._text
            return text, []
        content, calls = self._form.split(self._text, complete=complete)
        new = content[len(self.content) :]
        grown = list[tuple[int, ToolCall]]()
        for number, call in enumerate(calls):
            old = self.calls[number].arguments if number < len(self.calls) else None
            if old is None or old != call.arguments:
                grown.append((number, ToolCall("" if old is not None else call.name, call.arguments[len(old or "") :])))
        self.content = content
        self.calls = calls
        return new, grown


@dataclass(frozen=True, slots=True)
class Objects(ABC):
    """The objects of one reply to `request`, computed by `model`: one whole, or events of a stream."""

    request: ChatRequest
    model: Model
    prompt_tokens: int = 0  # of the first prompt
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    parts: dict[int, Parts] = field(default_factory=dict)  # of each answer
    texts: dict[int, TokenTexts] = field(default_factory=dict)  # of each answer
    prefix: ClassVar[str] = ""
    last: ClassVar[str] = "[DONE]"  # after the last event of a stream; may be empty

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}{uuid.uuid4().hex}")

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Event:
        """The whole reply."""

    def begin(self, index: int) -> Iterator[Event]:
        """The events before the first text of an answer."""
        yield from ()

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        """The events of a piece of an answer."""

    @abstractmethod
    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        """The events at the end of an answer."""

    @abstractmethod
    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """The events at the end of a stream."""

    def divided(self, text: str = "") -> Parts:
        """A new answer, divided into content and calls."""
        guide = self.request.options.guide
        parts = Parts(self.model.loaded.text.call_form if guide is not None and guide.tools is not None else None)
        parts.push(text, complete=True)
        return parts

    def usage(self, answers: Sequence[Answer]) -> Event:
        """Token counts, and under `vtx` the object of `vtx-run --json` without its text; of several answers a list."""
        completion = sum(len(answer.token_ids) for answer in answers)
        firsts = [answer.stats for answer in answers[:: self.request.n]]  # one of each prompt
        prompt = sum(stats.prompt_tokens for stats in firsts)
        several = [one.to_dict() for one in answers]
        for one in several:
            for name in ("text", "logprobs", "top_logprobs", "tool_calls", "thought"):
                one.pop(name, None)
        thought = sum(answer.thought_tokens for answer in answers)
        facts: dict[str, Any] = several[0] if len(several) == 1 else {"answers": several}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(stats.reused_tokens for stats in firsts)},
            "completion_tokens_details": {"reasoning_tokens": thought},
            "vtx": {**facts, **self.request.notes, "kv_slot_bytes": self.model.backend.kv_slot_bytes},
        }

    def timings(self, answers: Sequence[Answer]) -> Event:
        """The field `timings` of llama-server, of several answers a list; nothing if it was not asked for."""
        if not self.request.timings:
            return {}
        several = list(map(_timings, answers))
        return {"timings": several[0] if len(several) == 1 else several}

    def head(self, kind: str) -> Event:
        """The fields of every object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def logprobs(self, source: Answer | Progress, index: int) -> list[Mapping[str, Any]] | None:
        """The log probabilities of the next tokens of an answer in OpenAI's form; None if they were not asked for."""
        if not self.request.options.logprobs:
            return None
        text = self.token_texts(index)
        logprobs = list[Mapping[str, Any]]()
        tops = source.top_logprobs or ((),) * len(source.token_ids)
        for id, value, likely in zip(source.token_ids, source.logprobs or (), tops, strict=True):
            top = [_token(text.of(other), logprob) for other, logprob in likely]
            logprobs.append({**_token(text.of(id), value), "top_logprobs": top})
            text.push(id)
        return logprobs

    def token_texts(self, index: int) -> TokenTexts:
        """The tokens so far of an answer whose log probabilities were asked for."""
        if index not in self.texts:
            text = self.model.loaded.text
            self.texts[index] = TokenTexts(text, text.begun(self.request.prompt_of(index)))
        return self.texts[index]


def _timings(answer: Answer) -> Event:
    """The times of an answer; that of its prompt, with its images, is that of the first token."""
    times = answer.stats.timings_ms
    tokens = len(answer.token_ids)
    first = times.get("first_token", 0.0)
    token = times.get("decode_per_token", 0.0)
    cached = answer.stats.reused_tokens
    decoded = max(0, tokens - 1)
    prompt = answer.stats.prompt_tokens - cached
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": first,
        "predicted_n": tokens,
        "predicted_ms": token * decoded,
        "prompt_per_token_ms": first / max(1, prompt),
        "prompt_per_second": 1000 * prompt / max(first, 1e-9),
        "predicted_per_token_ms": token,
        "predicted_per_second": 1000 / token if token else 0.0,
    }


def _token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(text)}


def call_id() -> str:
    """A new id of a call; templates of Mistral want nine letters and digits."""
    return uuid.uuid4().hex[:9]
