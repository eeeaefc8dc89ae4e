"""Ollama's chat and generate: their fields as those of a chat completion, and their objects, whole and a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from vtx.runtime.api.answer import Answer
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.fields import FieldReader, RawPrompts, at, check_absent, image_part
from vtx.runtime.server.openai.objects import FINISHED, Event, Objects
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.strict import optional

NAMES = {"response_format": "format", "max_tokens": "options", "reasoning_effort": "think"}  # of fields, in errors
ABSENT = (
    "n",
    "response_format",
    "max_tokens",
    "max_completion_tokens",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "chat_template_kwargs",
    "timings_per_token",
)
UNBOUNDED = (1 << 31) - 1  # tokens; the server's limit is less
NANOSECONDS = 1_000_000  # a millisecond


@dataclass(frozen=True, slots=True)
class Named:
    """A request of /api/show; `name` is its older field, and `verbose` has no effect."""

    model: str = optional("")
    name: str = optional("")
    verbose: bool = optional(False)


@dataclass(frozen=True, slots=True)
class OllamaFunction:
    """The function of a call; `index` and `description` have no effect."""

    name: str
    arguments: Mapping[str, Any] = optional(None)
    index: int = optional(0)
    description: str = optional("")


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """A call of an answer."""

    function: OllamaFunction
    id: str = optional("")
    type: Literal["function"] = optional("function")


@dataclass(frozen=True, slots=True)
class OllamaMessage:
    """A message; its `images` are base64, and stand before its text. `tool_name` has no effect."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = optional("")
    images: tuple[str, ...] = optional(())
    tool_calls: tuple[OllamaCall, ...] = optional(())
    thinking: str = optional("")
    tool_name: str = optional("")
    tool_call_id: str = optional("")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The field `options`. Those from `num_ctx` on have no effect: a bundle and its server have them fixed."""

    temperature: float | None = optional(None)
    top_p: float | None = optional(None)
    top_k: int | None = optional(None)
    min_p: float | None = optional(None)
    seed: int | None = optional(None)
    stop: str | tuple[str, ...] | None = optional(None)
    repeat_penalty: float | None = optional(None)
    presence_penalty: float | None = optional(None)
    frequency_penalty: float | None = optional(None)
    num_predict: int | None = optional(None)
    num_ctx: int | None = optional(None)
    num_keep: int | None = optional(None)
    num_batch: int | None = optional(None)
    num_gpu: int | None = optional(None)
    main_gpu: int | None = optional(None)
    num_thread: int | None = optional(None)
    use_mmap: bool | None = optional(None)


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def chat_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /api/chat."""
    fields = _common_fields(body, reader)
    if "messages" in fields:
        messages = reader.value(tuple[OllamaMessage, ...], fields["messages"], at("messages"))
        fields["messages"] = [_message(message) for message in messages]
    return fields


def generate_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /api/generate."""
    check_absent(body, ("messages", "tools", "tool_choice"))
    fields = _common_fields(body, reader)
    prompt = reader.value(str, fields.pop("prompt", ""), at("prompt"))
    system = reader.value(str, fields.pop("system", ""), at("system"))
    images = reader.value(tuple[str, ...], fields.pop("images", []), at("images"))
    if reader.value(bool, fields.pop("raw", False), at("raw")):
        if images or system:
            raise Refusal(400, "a raw prompt has no images and no system text; leave out raw", param="raw")
        return fields | {"messages": RawPrompts(prompt)}
    turns = [OllamaMessage("system", system)] if system else []
    return fields | {"messages": [_message(turn) for turn in (*turns, OllamaMessage("user", prompt, images))]}


def refused(refusal: Refusal) -> Event:
    """An error as Ollama's clients parse it."""
    return {"error": str(refusal)}


def described(facts: Mapping[str, Any]) -> Event:
    """An object of /v1/models as one of /api/tags."""
    name = facts["id"]
    precision = facts["vtx"]["precision"]
    details = {"format": "vtx", "family": "vtx", "families": ["vtx"], "quantization_level": precision}
    moment = _moment(facts["created"])
    return {"name": name, "model": name, "modified_at": moment, "size": 0, "digest": "", "details": details}


def shown(facts: Mapping[str, Any]) -> Event:
    """An object of /v1/models as the reply of /api/show."""
    about = facts["vtx"]
    return {
        "details": described(facts)["details"],
        "modified_at": _moment(facts["created"]),
        "model_info": {"general.architecture": "vtx", "vtx.context_length": about["max_context"]},
        "capabilities": ["completion", "vision"],
    }


def _common_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """Without the fields that /api/chat and /api/generate share, and with what they mean."""
    check_absent(body, ABSENT)
    fields = {"stream": True, **body}
    fields.pop("keep_alive", None)  # models stay in memory as --memory says
    think = reader.value(bool | Literal["low", "medium", "high"] | None, fields.pop("think", None), at("think"))
    if think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(think)}
    form = reader.value(str | Mapping[str, Any], fields.pop("format", ""), at("format"))
    if form == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(form, str) and form:
        raise Refusal(400, f"format is {form!r:.40}; it must be json or a schema", param="format")
    elif form:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    if "options" in fields:
        options = reader.read(ModelOptions, fields.pop("options"), at("options"))
        fields |= {name: getattr(options, name) for name in SAMPLING}
        fields["repetition_penalty"] = options.repeat_penalty
        if options.num_predict is not None:
            fields["max_tokens"] = UNBOUNDED if options.num_predict < 0 else options.num_predict
    return fields


def _message(message: OllamaMessage) -> dict[str, Any]:
    images = [image_part(f"data:image/any;base64,{data}") for data in message.images]
    content = [*images, {"type": "text", "text": message.content}] if images else message.content
    calls = [asdict(call) for call in message.tool_calls]
    for call in calls:
        call["function"] = {name: call["function"][name] for name in ("name", "arguments")}
    facts = {
        "role": message.role,
        "content": content,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.thinking,
    }
    return facts | ({"tool_calls": calls} if calls else {})


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


class OllamaObjects(Objects):
    """The objects of one answer of /api/chat."""

    last = ""

    def whole(self, answers: Sequence[Answer]) -> Event:
        [answer] = answers
        said = self._said(self.divided(answer.text).content, _calls(answer), answer.thought or "")
        return {**said, **self._counts(answer)}

    def begin(self, index: int) -> Iterator[Event]:
        self.parts[index] = self.divided()
        yield from ()

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        if piece.thought:
            yield {**self._said("", [], piece.thought), "done": False}
        yield from self._grown(index, piece.text)

    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        yield from self._grown(index, "", complete=True)
        if calls := _calls(answer):  # a call comes whole
            yield {**self._said("", calls), "done": False}
        yield {**self._said("", []), **self._counts(answer)}

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        yield from ()

    def _grown(self, index: int, text: str, *, complete: bool = False) -> Iterator[Event]:
        content, _ = self.parts[index].push(text, complete=complete)
        if content:
            yield {**self._said(content, []), "done": False}

    def _said(self, text: str, calls: Sequence[Event], thought: str = "") -> Event:
        message: Event = {"role": "assistant", "content": text}
        message |= {"thinking": thought} if thought else {}
        message |= {"tool_calls": calls} if calls else {}
        return {"model": self.request.model, "created_at": _moment(self.created), "message": message}

    def _counts(self, answer: Answer) -> Event:
        """The end of an answer; times are nanoseconds."""
        times = answer.stats.timings_ms
        tokens = len(answer.token_ids)
        first = times.get("first_token", 0.0)
        rest = times.get("decode_per_token", 0.0) * max(0, tokens - 1)
        return {
            "done": True,
            "done_reason": FINISHED[answer.stopped],
            "total_duration": round((first + rest) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": answer.stats.prompt_tokens,
            "prompt_eval_duration": round(first * NANOSECONDS),
            "eval_count": tokens,
            "eval_duration": round(rest * NANOSECONDS),
            "vtx": self.usage([answer])["vtx"],
        }


class GenerateObjects(OllamaObjects):
    """The objects of one answer of /api/generate."""

    def _said(self, text: str, calls: Sequence[Event], thought: str = "") -> Event:
        facts = {"model": self.request.model, "created_at": _moment(self.created), "response": text}
        return facts | ({"thinking": thought} if thought else {})


def _calls(answer: Answer) -> list[Event]:
    """The complete calls of an answer."""
    return [
        {"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in answer.tool_calls or ()
    ]
