"""OpenAI's responses: their input as messages, and their objects, whole and as events. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.prompt.tools import ToolCall
from vtx.runtime.scheduler.scheduler import Piece
from vtx.runtime.server.openai.fields import (
    Effort,
    FieldReader,
    FunctionFields,
    ImageUrl,
    Role,
    at,
    check_absent,
    image_part,
    tool_of,
)
from vtx.runtime.server.openai.objects import FINISHED, Event, Objects, call_id
from vtx.runtime.strict import optional
from vtx.runtime.vision.layout import Detail

# Fields of a chat completion by their names here, for errors too.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
ABSENT = ("n", "max_tokens", "stream_options", "timings_per_token", *NAMES)


@dataclass(frozen=True, slots=True)
class TextInput:
    """A part of a message; `annotations` and `logprobs`, which replies have, have no effect."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: tuple[Any, ...] = optional(())
    logprobs: tuple[Any, ...] = optional(())


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a message, as `ImageUrl` has it."""

    type: Literal["input_image"]
    image_url: ImageUrl | str
    detail: Detail = optional("auto")
    image_tokens: int | None = optional(None)


@dataclass(frozen=True, slots=True)
class MessageItem:
    """A message; `id` and `status` of items, which replies have, have no effect."""

    role: Role
    content: str | tuple[TextInput | ImageInput, ...]
    type: Literal["message"] = optional("message")
    id: str = optional("")
    status: str = optional("")


@dataclass(frozen=True, slots=True)
class CallItem:
    """A call of an answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = optional("")
    id: str = optional("")
    status: str = optional("")


@dataclass(frozen=True, slots=True)
class ResultItem:
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | tuple[TextInput | ImageInput, ...]
    id: str = optional("")
    status: str = optional("")


@dataclass(frozen=True, slots=True)
class ReasoningItem:
    """The thought of an answer, as replies have it: without effect."""

    type: Literal["reasoning"]
    summary: tuple[Any, ...] = optional(())
    content: tuple[Any, ...] = optional(())
    id: str = optional("")
    status: str = optional("")


@dataclass(frozen=True, slots=True)
class FunctionItem(FunctionFields):
    """A function that may be called."""

    type: Literal["function"] = optional("function")


@dataclass(frozen=True, slots=True)
class FormatFields:
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Mapping[str, Any] | None = optional(None)
    name: str = optional("")
    description: str = optional("")
    strict: bool = optional(False)


@dataclass(frozen=True, slots=True)
class TextFields:
    """The field `text`."""

    format: FormatFields = optional(FormatFields("text"))


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The field `reasoning`."""

    effort: Effort | None = optional(None)


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """The function to call."""

    type: Literal["function"]
    name: str


Item = MessageItem | CallItem | ResultItem | ReasoningItem


def chat_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion for a body of /v1/responses."""
    fields = dict(body)
    check_absent(fields, ABSENT)
    if "input" in fields:
        items = reader.value(str | tuple[Item, ...], fields.pop("input"), at("input"))
        fields["messages"] = _messages(items)
    if "tools" in fields:
        reader.value(tuple[FunctionItem, ...], fields["tools"], at("tools"))
        fields["tools"] = [tool_of(function) for function in fields["tools"]]
    if "tool_choice" in fields:
        choice = reader.value(str | NamedFunction, fields["tool_choice"], at("tool_choice"))
        if isinstance(choice, NamedFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if "text" in fields:
        form = reader.read(TextFields, fields.pop("text"), at("text")).format
        schema = {"json_schema": {"schema": form.schema}} if form.type == "json_schema" else {}
        fields["response_format"] = {"type": form.type, **schema}
    if "reasoning" in fields:
        fields["reasoning_effort"] = reader.read(Reasoning, fields.pop("reasoning"), at("reasoning")).effort
    if "max_output_tokens" in fields:
        fields["max_completion_tokens"] = fields.pop("max_output_tokens")
    if "instructions" in fields:
        fields["messages"] = [{"role": "system", "content": fields.pop("instructions")}, *fields.get("messages", [])]
    if "top_logprobs" in fields:
        fields["logprobs"] = True
    if fields.get("include") == ["message.output_text.logprobs"]:
        fields["logprobs"] = bool(fields.pop("include"))
    return fields


def _messages(items: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Items as messages of chat completions."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = list[dict[str, Any]]()
    for item in items:
        if isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif isinstance(item, CallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    return messages


def _content(content: str | Sequence[TextInput | ImageInput]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} if isinstance(part, TextInput) else _image(part) for part in content]


def _image(part: ImageInput) -> dict[str, Any]:
    source = part.image_url
    if isinstance(source, ImageUrl):
        return image_part(source.url, detail=source.detail, image_tokens=source.image_tokens)
    return image_part(source, detail=part.detail, image_tokens=part.image_tokens)


@dataclass(frozen=True, slots=True)
class ResponseObjects(Objects):
    """The objects of one response."""

    items: list[Event] = field(default_factory=list)  # of the output so far; the last is open until the next begins
    count: list[int] = field(default_factory=lambda: [0])  # of events
    prefix: ClassVar[str] = "resp_"
    last: ClassVar[str] = ""

    def whole(self, answers: Sequence[Answer]) -> Event:
        [answer], parts = answers, self.divided(answers[0].text)
        if answer.thought is not None:
            self._open_thought(answer.thought)
        if parts.content or not parts.calls:
            self._open_message(parts.content)
        for call in parts.calls:
            self._open_call(call)
        for item in self.items:
            if item["type"] == "message":
                item["content"][0]["logprobs"] = self.logprobs(answer, 0) or []
        return self._response(answer)

    def begin(self, index: int) -> Iterator[Event]:
        self.parts[index] = self.divided()
        yield self._event("created", response=self._response(None))
        yield self._event("in_progress", response=self._response(None))

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        if piece.thought:
            if not self.items:
                self._open_thought("")
                yield self._event("output_item.added", output_index=0, item={**self.items[-1], "content": []})
            self.items[-1]["content"][0]["text"] += piece.thought
            yield self._of_item("reasoning_text.delta", content_index=0, delta=piece.thought)
        yield from self._grow(index, piece.text, piece.progress)

    def done(self, index: int, answer: Answer) -> Iterator[Event]:
        yield from self._grow(index, "", complete=True)
        if self._lacks_message:
            yield from self._message()
        yield from self._close(answer)

    def end(self, answers: Sequence[Answer]) -> Iterator[Event]:
        response = self._response(answers[0])
        yield self._event(response["status"], response=response)

    def _grow(
        self, index: int, text: str, progress: Progress | None = None, *, complete: bool = False
    ) -> Iterator[Event]:
        content, calls = self.parts[index].push(text, complete=complete)
        if content:
            if self._lacks_message:
                yield from self._message()
            item = self.items[-1]
            known = (self.logprobs(progress, 0) if progress else None) or []
            item["content"][0]["text"] += content
            item["content"][0]["logprobs"] += known
            yield self._of_item("output_text.delta", content_index=0, delta=content, logprobs=known)
        for _, call in calls:
            if call.name:
                yield from self._close()
                self._open_call(ToolCall(call.name, ""))
                yield self._event("output_item.added", output_index=len(self.items) - 1, item=dict(self.items[-1]))
            self.items[-1]["arguments"] += call.arguments
            yield self._of_item("function_call_arguments.delta", delta=call.arguments)

    @property
    def _lacks_message(self) -> bool:
        return not self.items or self.items[-1]["type"] == "reasoning"

    def _message(self) -> Iterator[Event]:
        yield from self._close()
        self._open_message("")
        item = self.items[-1]
        yield self._event("output_item.added", output_index=len(self.items) - 1, item={**item, "content": []})
        yield self._of_item("content_part.added", content_index=0, part=dict(item["content"][0]))

    def _close(self, answer: Answer | None = None) -> Iterator[Event]:
        """The end of the item that is open, if one is; `answer`: it is the last one."""
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = "incomplete" if answer is not None and FINISHED[answer.stopped] != "stop" else "completed"
        if item["type"] == "message":
            part = item["content"][0]
            yield self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
            yield self._of_item("content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            yield self._of_item("reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        yield self._event("output_item.done", output_index=len(self.items) - 1, item=item)

    def _open_thought(self, text: str) -> None:
        content = [{"type": "reasoning_text", "text": text}]
        item = {"id": f"rs_{call_id()}", "type": "reasoning", "status": "in_progress", "summary": []}
        self.items.append({**item, "content": content})

    def _open_message(self, text: str) -> None:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{call_id()}", "type": "message", "status": "in_progress", "role": "assistant"}
        self.items.append({**item, "content": [part]})

    def _open_call(self, call: ToolCall) -> None:
        item = {"id": f"fc_{call_id()}", "type": "function_call", "status": "in_progress", "call_id": call_id()}
        self.items.append({**item, "name": call.name, "arguments": call.arguments})

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self.count[0] += 1
        return {"type": f"response.{kind}", "sequence_number": self.count[0] - 1, **fields}

    def _response(self, answer: Answer | None) -> Event:
        """The response, of which `answer` is None until it is complete."""
        whole = answer is not None and FINISHED[answer.stopped] == "stop"
        status = "in_progress" if answer is None else "completed" if whole else "incomplete"
        for number, item in enumerate(self.items):
            item["status"] = status if number == len(self.items) - 1 else "completed"
        fields = self.request.fields
        counts = None
        if answer is not None:
            usage = self.usage([answer])
            counts = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
                "vtx": usage["vtx"],
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.request.model,
            "output": list(self.items) if answer is not None else [],
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "instructions": fields.get("instructions"),
            "tools": fields.get("tools", []),
            "tool_choice": fields.get("tool_choice", "auto"),
            "text": fields.get("text", {"format": {"type": "text"}}),
            "metadata": fields.get("metadata", {}),
            "max_output_tokens": fields.get("max_output_tokens"),
            "previous_response_id": None,
            "store": False,
            "temperature": self.request.options.sampling.temperature,
            "top_p": self.request.options.sampling.top_p,
            "truncation": "disabled",
            "usage": counts,
        }
