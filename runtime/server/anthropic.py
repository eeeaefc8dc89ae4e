"""Anthropic's messages: their blocks as messages of a chat completion, and their objects, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vtx.runtime.api.answer import Answer
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.fields import FieldReader, at, check_absent, image_part
from vtx.runtime.server.openai.objects import Event, Objects, call_id
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.strict import optional

# Fields of a chat completion by their names here, for errors too.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "max_thinking_tokens": "thinking",
}
SWITCH = {"reasoning_effort": "thinking"}  # in errors
ABSENT = (
    "n",
    "stream_options",
    "parallel_tool_calls",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "chat_template_kwargs",
    "timings_per_token",
    *NAMES,
)
REASONS = {
    "end": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "timeout": "max_tokens",
    "context": "model_context_window_exceeded",
}
ERRORS = {  # by HTTP status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A text; `cache_control` has no effect, since every beginning of a prompt is kept."""

    type: Literal["text"]
    text: str
    cache_control: Any = optional(None)


@dataclass(frozen=True, slots=True)
class Base64Source:
    """An image in the request."""

    type: Literal["base64"]
    media_type: str
    data: str


@dataclass(frozen=True, slots=True)
class UrlSource:
    """An image at an address of `--image-hosts`."""

    type: Literal["url"]
    url: str


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image, of at most `image_tokens`; `cache_control` has no effect."""

    type: Literal["image"]
    source: Base64Source | UrlSource
    image_tokens: int | None = optional(None)
    cache_control: Any = optional(None)


@dataclass(frozen=True, slots=True)
class CallBlock:
    """A call of an answer; `cache_control` has no effect."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Mapping[str, Any]
    cache_control: Any = optional(None)


@dataclass(frozen=True, slots=True)
class ResultBlock:
    """The result of a call; `is_error` and `cache_control` have no effect."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | tuple[TextBlock | ImageBlock, ...] = optional("")
    is_error: bool = optional(False)
    cache_control: Any = optional(None)


@dataclass(frozen=True, slots=True)
class ThoughtBlock:
    """The thought of an answer; `signature` has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str = optional("")


@dataclass(frozen=True, slots=True)
class MessageTurn:
    """A message."""

    role: Literal["user", "assistant"]
    content: str | tuple[TextBlock | ImageBlock | CallBlock | ResultBlock | ThoughtBlock, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool; `cache_control` has no effect."""

    name: str
    input_schema: Mapping[str, Any] | None = optional(None)
    description: str = optional("")
    type: str = optional("custom")
    strict: bool = optional(False)
    cache_control: Any = optional(None)


@dataclass(frozen=True, slots=True)
class CallChoice:
    """The calls that are allowed: of the tool `name` for "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = optional("")
    disable_parallel_tool_use: bool = optional(False)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The field `thinking`; `budget_tokens` are the most of a thought."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = optional(None)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """The field `output_config`."""

    format: OutputFormat | None = optional(None)


def chat_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /v1/messages."""
    fields = dict(body)
    check_absent(fields, ABSENT)
    if "messages" in fields:
        turns = reader.value(tuple[MessageTurn, ...], fields["messages"], at("messages"))
        fields["messages"] = [message for turn in turns for message in _messages(turn)]
    if "system" in fields:
        system = reader.value(str | tuple[TextBlock, ...], fields.pop("system"), at("system"))
        fields["messages"] = [{"role": "system", "content": _content(system)}, *fields.get("messages", [])]
    if "tools" in fields:
        tools = reader.value(tuple[Tool, ...], fields["tools"], at("tools"))
        fields["tools"] = [_tool(tool) for tool in tools]
    if "tool_choice" in fields:
        choice = reader.value(CallChoice, fields["tool_choice"], at("tool_choice"))
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if "output_config" in fields:
        form = reader.value(OutputConfig, fields.pop("output_config"), at("output_config")).format
        if form is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema}}
    if "thinking" in fields:
        thinking = reader.read(Thinking, fields.pop("thinking"), at("thinking"))
        fields["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
        fields["max_thinking_tokens"] = thinking.budget_tokens
    for name in ("max_completion_tokens", "stop"):
        if NAMES[name] in fields:
            fields[name] = fields.pop(NAMES[name])
    return fields


def refused(refusal: Refusal) -> Event:
    """An error as Anthropic's clients parse it."""
    kind = ERRORS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.type != "custom" or tool.input_schema is None:
        raise Refusal(
            400,
            f"the tool {tool.name!r:.40} of type {tool.type!r:.40} has no input_schema for its calls; give tools "
            "of type custom with one",
            code="invalid_value",
            param="tools",
        )
    about = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}


def _messages(turn: MessageTurn) -> Iterator[dict[str, Any]]:
    """A turn as messages of chat completions: results of calls come before what else the user says."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    for block in turn.content:
        if isinstance(block, ResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content)}
    parts = tuple(block for block in turn.content if isinstance(block, TextBlock | ImageBlock))
    calls = [_call(block) for block in turn.content if isinstance(block, CallBlock)]
    thought = "".join(block.thinking for block in turn.content if isinstance(block, ThoughtBlock))
    facts = {"role": turn.role, "content": _content(parts), "reasoning_content": thought}
    if calls:
        yield {**facts, "tool_calls": calls}
    elif parts or not turn.content:
        yield facts


def _call(block: CallBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _content(content: str | Sequence[TextBlock | ImageBlock]) -> Any:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return image_part(url, image_tokens=block.image_tokens)


@dataclass(frozen=True, slots=True)
class MessageObjects(Objects):
    """The objects of one message."""

    kinds: list[str] = field(default_factory=list)  # of the blocks so far; the last is open
    prefix: ClassVar[str] = "msg_"
    last: ClassVar[str] = ""

    def whole(self, answers: Sequence[Answer]) -> Event:
        [answer] = answers
        content = self.divided(answer.text).content
        calls = answer.tool_calls or ()
        blocks = [] if answer.thought is None else [_thought_block(answer.thought)]
        blocks += [{"type": "text", "text": content}] if content or not calls else []
        blocks += [_call_block(call.name) | {"input": json.loads(call.arguments)} for call in calls]
        return self._message(blocks, self._ending(answer), self._usage(answer))

    def begin(self, index: int) -> Iterator[Event]:
        self.parts[index] = self.divided()
        ending = {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}  # the end tells how many were cached
        yield {"type": "message_start", "message": self._message([], ending, usage)}

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        if piece.thought:
            if not self.kinds:
                yield from self._open(_thought_block(""))
            yield self._delta({"type": "thinking_delta", "thinking": piece.thought})
        yield from self._grow(index, piece.text)

    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        yield from self._grow(index, "", complete=True)
        if self.kinds in ([], ["thinking"]):
            yield from self._open({"type": "text", "text": ""})
        yield from self._close()
        yield {"type": "message_delta", "delta": self._ending(answer), "usage": self._usage(answer)}

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        yield {"type": "message_stop"}

    def _grow(self, index: int, text: str, *, complete: bool = False) -> Iterator[Event]:
        content, calls = self.parts[index].push(text, complete=complete)
        if content:
            if self.kinds[-1:] != ["text"]:
                yield from self._open({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": content})
        for _, call in calls:
            if call.name:
                yield from self._open(_call_block(call.name) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: Event) -> Iterator[Event]:
        """End the block that is open, and begin another."""
        yield from self._close()
        self.kinds.append(block["type"])
        yield {"type": "content_block_start", "index": len(self.kinds) - 1, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self.kinds:
            yield {"type": "content_block_stop", "index": len(self.kinds) - 1}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self.kinds) - 1, "delta": delta}

    def _message(self, blocks: Sequence[Event], ending: Event, usage: Event) -> Event:
        facts = {"id": self.id, "type": "message", "role": "assistant", "model": self.request.model}
        return {**facts, "content": blocks, **ending, "usage": usage}

    def _ending(self, answer: Answer) -> Event:
        """The reason for the end of an answer; the stop sequence only where there is one: the text does not have it."""
        stops = self.request.options.stop
        only = stops[0] if answer.stopped == "stop" and len(stops) == 1 else None
        called = answer.tool_calls and answer.stopped == "end"
        return {"stop_reason": "tool_use" if called else REASONS[answer.stopped], "stop_sequence": only}

    def _usage(self, answer: Answer) -> Event:
        usage = self.usage([answer])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "vtx": usage["vtx"],
        }


def _thought_block(thought: str) -> Event:
    return {"type": "thinking", "thinking": thought, "signature": ""}


def _call_block(name: str) -> Event:
    return {"type": "tool_use", "id": f"toolu_{call_id()}", "name": name}
