"""The fields of requests, declared once as types: what is not declared here is not supported, at any depth."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.strict import Strict, optional
from vtx.runtime.vision.layout import Detail

T = TypeVar("T")
WHERE = "the request"
NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
# Unknown fields that change the prompt or the form of the answer where they are known; no server ignores them.
NEVER_IGNORED = frozenset(
    """add_generation_prompt allowed_token_ids audio bad_words chat_template chat_template_kwargs
    continue_final_message conversation documents ebnf echo file_id files format fps function_call functions grammar
    guided_decoding image image_data image_url image_urls images input input_audio instructions json_schema lora
    lora_path max_frames max_pixels min_pixels min_tokens mm_processor_kwargs multi_modal_data options prefix
    previous_response_id prompt prompt_embeds regex schema stop_token_ids structural_tag structured_outputs suffix
    system system_prompt template truncate_prompt_tokens video video_url videos""".split()  # noqa: SIM905 -- a list of names, one a line, would be a page
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class RawPrompts:
    """In place of messages: prompts that no template prints, as texts with control tokens or as token ids.

    With `echo` each stands before its answers.
    """

    __slots__ = ("echo", "prompts")

    def __init__(self, *prompts: str | tuple[int, ...], echo: bool = False) -> None:
        self.prompts = prompts
        self.echo = echo


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An image, of at most `image_tokens` tokens, or as large as `detail` says where images have a choice."""

    url: str
    detail: Detail = optional("auto")
    image_tokens: int | None = optional(None)


@dataclass(frozen=True, slots=True)
class VideoUrl:
    """A video, of which `frames` are sampled."""

    url: str
    frames: int | None = optional(None)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a message."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A part of a message. An image with a `uuid` may be left out of later requests with it, as in vLLM."""

    type: Literal["image_url"]
    image_url: ImageUrl | str | None = optional(None)
    uuid: str = optional("")


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A part of a message."""

    type: Literal["video_url"]
    video_url: VideoUrl | str


@dataclass(frozen=True, slots=True)
class Called:
    """The function of a call."""

    name: str
    arguments: str | Mapping[str, Any] = optional("")


@dataclass(frozen=True, slots=True)
class CallFields:
    """A call in a message; `index`, which streams have, has no effect."""

    function: Called
    id: str = optional("")
    type: Literal["function"] = optional("function")
    index: int = optional(0)


@dataclass(frozen=True, slots=True)
class MessageFields:
    """A message; an assistant's `reasoning_content` is its thought.

    Fields behind it are of replies, or names that no template prints: without effect.
    """

    role: Role
    content: str | tuple[TextPart | ImagePart | VideoPart, ...] | None = optional(None)
    tool_calls: tuple[CallFields, ...] = optional(())
    tool_call_id: str = optional("")
    reasoning_content: str = optional("")
    name: str = optional("")
    refusal: str = optional("")
    annotations: tuple[Any, ...] = optional(())


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A schema that the answer follows, also if it is not `strict`."""

    schema: Mapping[str, Any] | bool
    name: str = optional("")
    description: str = optional("")
    strict: bool = optional(False)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = optional(None)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """vLLM's form of the answer: one of these."""

    json: Mapping[str, Any] | bool | str | None = optional(None)
    choice: tuple[str, ...] | None = optional(None)
    regex: str | None = optional(None)
    grammar: str | None = optional(None)
    json_object: bool = optional(False)


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """vLLM's variables of the chat template: thoughts on or off."""

    enable_thinking: bool | None = optional(None)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream; `include_obfuscation` has no effect."""

    include_usage: bool = optional(False)
    include_obfuscation: bool = optional(False)


@dataclass(frozen=True, slots=True)
class FunctionFields:
    """A function that may be called."""

    name: str
    description: str = optional("")
    parameters: Mapping[str, Any] = optional(None)
    strict: bool = optional(False)


@dataclass(frozen=True, slots=True)
class ToolFields:
    """A tool."""

    type: Literal["function"]
    function: FunctionFields


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the declared fields of a function as its client wrote them, since templates print them in order."""
    names = FunctionFields.__dataclass_fields__
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if name in names and value is not None},
    }


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function."""

    name: str


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True, slots=True)
class ChatFields:
    """A chat completion; None: left out. Ranges are checked by the settings that the values become."""

    messages: tuple[MessageFields, ...] | RawPrompts
    model: str = optional("")
    max_tokens: int | None = optional(None)
    max_completion_tokens: int | None = optional(None)
    temperature: float | None = optional(None)
    top_p: float | None = optional(None)
    top_k: int | None = optional(None)
    min_p: float | None = optional(None)
    seed: int | None = optional(None)
    repetition_penalty: float | None = optional(None)
    presence_penalty: float | None = optional(None)
    frequency_penalty: float | None = optional(None)
    logit_bias: Mapping[str, float] | None = optional(None)
    stop: str | tuple[str, ...] | None = optional(None)
    ignore_eos: bool = optional(False)
    logprobs: bool = optional(False)
    top_logprobs: int | None = optional(None)
    n: int = optional(1)
    stream: bool = optional(False)
    stream_options: StreamOptions | None = optional(None)
    response_format: ResponseFormat | None = optional(None)
    tools: tuple[ToolFields, ...] = optional(())
    tool_choice: str | NamedChoice | None = optional(None)
    parallel_tool_calls: bool = optional(True)
    guided_json: Mapping[str, Any] | bool | str | None = optional(None)
    guided_choice: tuple[str, ...] | None = optional(None)
    guided_regex: str | None = optional(None)
    guided_grammar: str | None = optional(None)
    structured_outputs: StructuredOutputs | None = optional(None)
    grammar: str | None = optional(None)
    schema_in_prompt: bool = optional(False)
    fill: bool = optional(False)
    k: int | Literal["none", "auto", "card", "default"] = optional("default")
    rest: str | int | float | None = optional(None)
    accept: str | int | float | None = optional(None)
    reduce: str = optional("default")
    about: str | None = optional(None)
    gate_threshold: float | None = optional(None)
    image_tokens: int | None = optional(None)
    boxes: bool = optional(False)
    reuse: bool = optional(True)
    deadline_ms: int | None = optional(None)
    priority: int | None = optional(None)
    reasoning_effort: Effort | None = optional(None)
    chat_template_kwargs: TemplateFields | None = optional(None)
    max_thinking_tokens: int | None = optional(None)
    timings_per_token: bool = optional(False)


@dataclass(frozen=True, slots=True)
class FieldReader(Strict):
    """Reads requests strictly, null as left out. Raises Refusal, which names the field.

    A `lenient` one notes unknown fields in `ignored`, but for those that change what is computed.
    """

    error: type[VtxError] = RequestError
    lenient: bool = False
    ignored: list[str] = field(default_factory=list)

    def read(self, kind: type[T], data: Any, where: str) -> T:
        """`data` as the dataclass `kind`."""
        if not isinstance(data, dict):
            raise self.mismatch(where, data, (kind,))
        return Strict.read(self, kind, {name: value for name, value in data.items() if value is not None}, where)

    def unknown(self, where: str, name: str) -> None:
        """Ignore a field, or raise its Refusal."""
        inside = where.partition(": ")[2]
        place = f"{inside}: " if inside else ""
        if self.lenient and name not in NEVER_IGNORED:
            self.ignored.append(place + shown(name))
            return
        raise Refusal(
            400,
            f"there is no field {shown(name)}{f' in {inside}' if inside else ''}; leave it out",
            code="unknown_parameter",
            param=f"{place}{name}".replace(": ", ".")[:80],
        )

    def missing(self, where: str, name: str) -> VtxError:
        """The Refusal of a missing field."""
        inside = where.partition(": ")[2]
        param = where.split(": ")[1:2]
        if inside:
            return Refusal(400, f"{inside} has no {name}; add it", code="invalid_value", param=param[0])
        return Refusal(400, f"{where} has no {name}; add it", code="missing_required_parameter", param=name)

    def mismatch(self, where: str, data: Any, kinds: Sequence[Any]) -> VtxError:
        """The Refusal of a value of another type."""
        inside = where.partition(": ")[2]
        value = f"{data!r:.60}" if isinstance(data, str | bool | int | float) else _nouns([type(data)])
        return Refusal(
            400,
            f"{inside} is {value}; it must be {_nouns(kinds)}",
            code="invalid_value",
            param=inside.partition(": ")[0],
        )


def at(name: str) -> str:
    """The place of a field of the request, for errors."""
    return f"{WHERE}: {name}"


def image_part(url: str, **more: Any) -> dict[str, Any]:
    """The part of a message with the image of this data URL or address, and `more` fields, as `ImagePart` reads it."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


THOUGHTS = ("reasoning_effort", "chat_template_kwargs", "max_thinking_tokens")  # which a whole prompt does not have


def check_absent(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise Refusal for fields of a chat completion that another address does not have."""
    for name in names:
        if name in fields:
            raise Refusal(400, f"there is no field {name}; leave it out", code="unknown_parameter", param=name)


def _nouns(kinds: Sequence[Any]) -> str:
    """Types in the words of JSON."""
    nouns = list[str]()
    tags = list[str]()
    for kind in kinds:
        tag = typing.get_type_hints(kind).get("type") if dataclasses.is_dataclass(kind) else None
        if typing.get_origin(kind) is Literal:
            nouns += map(str, typing.get_args(kind))
        elif tag is not None:
            tags += typing.get_args(tag)
        elif kind in (list, tuple) or typing.get_origin(kind) is tuple:
            nouns.append("a list")
        elif kind is not type(None):
            nouns.append(NOUNS.get(kind, "an object"))
    nouns += [f"an object of type {_listed(tags)}"] if tags else []
    return _listed(nouns)


def _listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
