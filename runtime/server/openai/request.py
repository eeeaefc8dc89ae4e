"""The body of a request, checked field by field. Fields that vtx does not support are refused by name."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vtx.runtime.api.messages import split_images
from vtx.runtime.api.options import DEFAULT, K, Options, Settings
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.checks import check_text, check_whole
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import Guide, of_gbnf
from vtx.runtime.prompt.messages import Message, parts_of, with_tools
from vtx.runtime.prompt.tools import Tools
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai.fields import (
    NEVER_IGNORED,
    WHERE,
    ChatFields,
    FieldReader,
    ImagePart,
    ImageUrl,
    MessageFields,
    NamedChoice,
    RawPrompts,
    ResponseFormat,
    StructuredOutputs,
    TextPart,
    VideoPart,
    VideoUrl,
    tool_of,
)
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.remote import RemoteImage, remote_image
from vtx.runtime.server.sent import NamedImage
from vtx.runtime.session.sampling import Sampling
from vtx.runtime.vision.video import Video

S = TypeVar("S", Options, Sampling)
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "repetition_penalty",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
OPTIONS = (
    "gate_threshold",
    "rest",
    "stop",
    "top_logprobs",
    "prompt_logprobs",
    "about",
    "priority",
    "boxes",
    "max_thinking_tokens",
)
# Fields of OpenAI's responses that the reply repeats.
REPEATED = (
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "metadata",
    "max_output_tokens",
    "encoding_format",
)
# Fields of OpenAI's API without a meaning here, whatever their value.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
GUIDED = {  # vLLM's fields
    "guided_json": "schema",
    "guided_choice": "choices",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
}
# Fields that may be given with the value that changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
}
NO_THOUGHTS = ("none", "minimal")  # of the field `reasoning_effort`
STRUCTURED = {"json": "schema", "choice": "choices", "regex": "regex", "grammar": "grammar"}  # of vLLM's newer field
Translate = Callable[[dict[str, Any], FieldReader], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request: `messages`, and their `images` and videos in order, as data URLs, images still to be fetched, or by
    the names that their client gave them.

    `reuse`: start from the caches of earlier requests. `n`: answers. `notes`: differences to what was asked for, which
    the reply has: fields that were `ignored`, and `max_tokens` if it is less. `deadline`: seconds from its arrival to
    its end, None: the server's limit. `form`: the field that gives the form of the answer. `fields`: those of the body
    that a reply repeats. `more`: further prompts of a completion, each with `n` answers; with `echo` prompts stand
    before their answers. `timings`: the reply has them.
    """

    model: str
    messages: list[Message]
    images: tuple[str | bytes | RemoteImage | NamedImage | Video, ...]
    k: K
    reduce: str | None
    options: Options
    stream: bool
    include_usage: bool
    reuse: bool
    n: int = 1
    notes: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    form: str | None = None
    lenient: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[list[Message], ...] = ()
    echo: bool = False
    timings: bool = False

    @property
    def prompts(self) -> list[list[Message]]:
        """The messages of each prompt."""
        return [self.messages, *self.more]

    @property
    def answers(self) -> int:
        """The number of answers to all prompts."""
        return self.n * len(self.prompts)

    def prompt_of(self, number: int) -> list[Message]:
        """The messages that its answer `number` is to."""
        return self.prompts[number // self.n]

    @property
    def adapts(self) -> bool:
        """True if K and reductions may be chosen so that its deadline is kept: it names none, and no rest."""
        return self.deadline is not None and self.k == self.reduce == DEFAULT and self.options.rest is None

    def settings(self, number: int = 0) -> Settings:
        """The settings of its answer `number`; with a seed, that of each answer to a prompt is one more."""
        seed = self.options.sampling.seed
        sampling = replace(self.options.sampling, seed=None if seed is None else seed + number % self.n)
        return Settings(self.k, replace(self.options, timeout=None, sampling=sampling), self.reduce)


def read_request(
    body: bytes | bytearray,
    limits: Limits,
    hosts: Collection[str] = (),
    *,
    lenient: bool = False,
    translate: Translate | None = None,
) -> ChatRequest:
    """The request that a body holds; images may be at addresses of `hosts`. Raises Refusal for anything else.

    `translate` makes the fields of a chat completion of another address's. A `lenient` server ignores fields and values
    that it does not support, and says so.
    """
    data = parse_json(body.removeprefix(codecs.BOM_UTF8), "the body", error=RequestError)
    if not isinstance(data, dict):
        raise Refusal(400, f"the body is {type(data).__name__}, not an object; send a request as OpenAI's API has it")
    given = {name: value for name, value in data.items() if value is not None}
    reader = FieldReader(lenient=lenient)
    present = translate(dict(given), reader) if translate is not None else dict(given)
    present = _supported(present, reader, lenient=lenient)
    fields = reader.read(ChatFields, present, WHERE)
    with naming("messages"):
        images, (messages, *more) = _messages(fields, limits, hosts)
    options, notes = _options(fields, limits)
    form, guide = _guide(fields, present)
    if guide is not None:
        with naming(form):
            options = replace(options, guide=guide)
    if fields.accept is not None:
        with naming("accept"):
            options = replace(options, accept=fields.accept)
    messages = with_tools(messages, [] if guide is None else guide.listed_tools, _thinking(fields))
    _check(fields, limits)
    usage = fields.stream_options is not None and fields.stream_options.include_usage
    notes = {"ignored": reader.ignored, **notes} if reader.ignored else notes
    seconds = None if fields.deadline_ms is None else fields.deadline_ms / 1000
    return ChatRequest(
        fields.model,
        messages,
        tuple(images),
        fields.k,
        fields.reduce,
        options,
        fields.stream,
        usage,
        fields.reuse,
        fields.n,
        notes,
        seconds,
        form,
        lenient,
        {name: given[name] for name in REPEATED if name in given},
        tuple(more),
        isinstance(fields.messages, RawPrompts) and fields.messages.echo,
        fields.timings_per_token,
    )


def _thinking(fields: ChatFields) -> bool | None:
    """True or False if thoughts are switched on or off, None if the fields leave them to the chat template."""
    if fields.chat_template_kwargs is not None and fields.chat_template_kwargs.enable_thinking is not None:
        return fields.chat_template_kwargs.enable_thinking
    return None if fields.reasoning_effort is None else fields.reasoning_effort not in NO_THOUGHTS


def _supported(present: dict[str, Any], reader: FieldReader, *, lenient: bool) -> dict[str, Any]:
    """The fields without those that change nothing. Raises Refusal for values that vtx does not support."""
    for name in sorted(set(present) & set(NEUTRAL)):
        value = present.pop(name)
        if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in NEUTRAL[name]):
            continue
        if not lenient or name in NEVER_IGNORED:
            raise Refusal(
                400,
                f"{name} is {value!r:.40}, which vtx does not support; leave it out",
                code="unsupported_value",
                param=name,
            )
        reader.ignored.append(name)
    return {name: value for name, value in present.items() if name not in IGNORED}


def _check(fields: ChatFields, limits: Limits) -> None:
    """Raise Refusal for values that no other record checks."""
    with naming("stream_options"):
        if fields.stream_options is not None and not fields.stream:
            raise RequestError('stream_options are for streams; add "stream": true, or leave them out')
    with naming("prompt_logprobs"):
        if fields.prompt_logprobs is not None and fields.stream:
            raise RequestError("prompt_logprobs are not a part of streams; leave stream or prompt_logprobs out")
    with naming("reduce"):
        check_text("reduce", fields.reduce)
    with naming("deadline_ms"):
        check_whole("deadline_ms", fields.deadline_ms or 0, 0)
    with naming("n"):
        check_whole("n", fields.n, 1, min(limits.parallel, limits.new_tokens))


@contextmanager
def naming(param: str | None) -> Iterator[None]:
    """Make an error within the block a Refusal that names the field."""
    try:
        yield
    except Refusal:
        raise
    except RequestError as e:
        raise Refusal(400, str(e), code="invalid_value", param=param) from e


def _options(fields: ChatFields, limits: Limits) -> tuple[Options, dict[str, Any]]:
    """The options without a guide, and notes of what differs from the request."""
    tokens = Options().max_new_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        if (value := getattr(fields, name)) is not None:
            with naming(name):
                check_whole("the number of tokens", value, 1)
            tokens = value
    options = Options(
        max_new_tokens=min(tokens, limits.new_tokens),
        ignore_eos=fields.ignore_eos,
        logprobs=fields.logprobs,
        sampling=_changed(Sampling(), fields, SAMPLING),
        timeout=limits.seconds,
    )
    with naming("min_tokens"):
        options = replace(options, min_new_tokens=fields.min_tokens or 0)
    notes = {"max_tokens": limits.new_tokens} if tokens > limits.new_tokens else {}
    return _changed(options, fields, OPTIONS), notes


def _changed(settings: S, fields: ChatFields, names: Sequence[str]) -> S:
    """`settings`, which check themselves, with those of these fields that are given."""
    for name in names:
        value = getattr(fields, name)
        if value is None:
            continue
        with naming(name):
            if name == "logit_bias":
                if not all(token.isdecimal() and len(token) < 12 for token in value):
                    raise RequestError(
                        f'logit_bias is {value!r:.40}; it must be an object of token ids, {{"15": -100}}'
                    )
                value = tuple((int(token), bias) for token, bias in value.items())
            settings = replace(settings, **{name: value})
    return settings


def _guide(fields: ChatFields, present: Mapping[str, Any]) -> tuple[str | None, Guide | None]:
    """The form of the answer, and the field that gives it."""
    guides = {"response_format": _response_format(fields.response_format), "tools": _tools(fields, present)}
    for name, kind in GUIDED.items():
        if getattr(fields, name) is not None:
            with naming(name):
                guides[name] = Guide(**{kind: present[name]})
    if fields.structured_outputs is not None:
        with naming("structured_outputs"):
            guides["structured_outputs"] = _structured(fields.structured_outputs)
    if fields.grammar is not None:
        with naming("grammar"):
            guides["grammar"] = Guide(grammar=of_gbnf(fields.grammar))
    forms = [(name, guide) for name, guide in guides.items() if guide is not None]
    if len(forms) > 1:
        names = " and ".join(name for name, _ in forms)
        raise Refusal(
            400, f"{names} are given, each a form of the answer; give one", code="invalid_value", param=forms[1][0]
        )
    form, guide = forms[0] if forms else (None, None)
    for way in ("schema_in_prompt", "fill"):
        with naming(way):
            if getattr(fields, way) and guide is None:
                raise RequestError(f"{way} is for a schema; give response_format or guided_json, or leave {way} out")
            if getattr(fields, way) and guide is not None:
                changes: dict[str, Any] = {way: True}
                guide = replace(guide, **changes)
    return form, guide


def _tools(fields: ChatFields, present: Mapping[str, Any]) -> Guide | None:
    """The calls that the fields of tools allow or ask for; None if there are to be none.

    The tools are taken from the fields that are `present`, as their client wrote them.
    """
    functions = [tool_of(tool["function"]) for tool in present["tools"]] if fields.tools else None
    choice = fields.tool_choice.function.name if isinstance(fields.tool_choice, NamedChoice) else fields.tool_choice
    if functions is not None:
        with naming("tools"):
            Guide(tools=functions)
    if choice == "none" or (functions is None and choice in ("auto", None)):
        return None
    with naming("tool_choice"):
        if functions is None:
            raise RequestError(f"tool_choice is {choice!r:.60}; other choices than none and auto are next to tools")
        return Guide(tools=Tools(functions, choice or "auto", fields.parallel_tool_calls))


def _structured(form: StructuredOutputs) -> Guide:
    """The form that vLLM's field asks for."""
    kinds = {kind: getattr(form, name) for name, kind in STRUCTURED.items()}
    if form.json_object:
        return Guide(**{**kinds, "schema": {"type": "object"}})
    return Guide(**kinds)


def _response_format(form: ResponseFormat | None) -> Guide | None:
    """The form that OpenAI's field asks for; None for text."""
    if form is None or form.type == "text":
        return None
    with naming("response_format"):
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise RequestError(
                f'response_format has the type {form.type}; json_schema, and no other, has "json_schema": {{"schema": '
                "{...}}"
            )
        schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema
        return Guide(schema=schema)


def _messages(fields: ChatFields, limits: Limits, hosts: Collection[str]) -> tuple[list[Any], list[list[Message]]]:
    """The images and messages of OpenAI's form, of each prompt; images as data URLs, or at addresses of `hosts`."""
    given = fields.messages
    if isinstance(given, RawPrompts):
        count = len(given.prompts)
        if not 1 <= count <= limits.prompts:
            raise RequestError(f"{count} prompts are given; it must be 1 to {limits.prompts}, this server's limit")
        return [], [[_raw(prompt)] for prompt in given.prompts]
    _check_turns(given)
    images, messages = split_images([_message(message, hosts) for message in given])
    if fields.image_tokens is not None:
        for message in messages:
            for part in parts_of(message):
                if part["type"] == "image":
                    part.setdefault("image_tokens", fields.image_tokens)
    if len(images) > limits.images:
        raise Refusal(
            413,
            f"{len(images)} images and videos are given, the limit of this server is {limits.images}; send fewer",
            code="too_many_images",
            param="messages",
        )
    return images, [messages]


def _check_turns(messages: Sequence[MessageFields]) -> None:
    """Raise RequestError if no question is asked, or the last message is none that is answered."""
    last = messages[-1] if messages else None
    ends = last is not None and last.role in ("user", "assistant", "tool") and not last.tool_calls
    if not ends or all(message.role != "user" for message in messages):
        raise RequestError(
            "messages must be a list, and the last message in it the user's question, a tool's result, or the "
            "beginning of the answer: role 'user', 'tool', or 'assistant' without calls"
        )


def _raw(prompt: str | tuple[int, ...]) -> Message:
    if isinstance(prompt, str):
        return {"role": "prompt", "content": prompt}
    return {"role": "prompt", "content": "", "ids": prompt}


def _message(message: MessageFields, hosts: Collection[str]) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, tuple):
        content = [_part(part, hosts) for part in content]
    if content is None and message.role == "assistant":
        content = ""
    turn = {"role": message.role, "content": content, "tool_call_id": message.tool_call_id}
    if message.reasoning_content and message.role == "assistant":
        turn["reasoning_content"] = message.reasoning_content
    calls = [
        {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
        for call in message.tool_calls
    ]
    return turn | ({"tool_calls": calls} if calls else {})


def _part(part: TextPart | ImagePart | VideoPart, hosts: Collection[str]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    source = part.image_url if isinstance(part, ImagePart) else part.video_url
    if source is None:
        if isinstance(part, VideoPart) or not part.uuid:
            raise RequestError("an image has no image_url, and no uuid under which it was sent before")
        return {"type": "image", "image": NamedImage(part.uuid, None)}
    url = source if isinstance(source, str) else source.url
    local = url[:5].lower() == "data:"
    if isinstance(source, VideoUrl) or isinstance(part, VideoPart):
        return _video(url, source.frames if isinstance(source, VideoUrl) else None)
    image: Any = url
    if hosts and not local:
        image = remote_image(url, hosts)
    elif not local:
        raise RequestError(
            f"an image must be a data URL, data:image/jpeg;base64,...; got {url!r:.80}. This server fetches no "
            "addresses and opens no files"
        )
    elif isinstance(part, ImagePart) and part.uuid:
        image = NamedImage(part.uuid, url)
    return {"type": "image", "image": image} | _detail(source)


def _video(url: str, frames: int | None) -> dict[str, Any]:
    if url[:5].lower() != "data:":
        raise RequestError(
            f"a video must be a data URL, data:video/mp4;base64,...; got {url!r:.80}. This server fetches no videos "
            "and opens no files"
        )
    return {"type": "video_url", "video_url": {"url": url, "frames": frames}}


def _detail(source: ImageUrl | str) -> dict[str, Any]:
    """The fields of an image about its tokens."""
    if isinstance(source, str):
        return {}
    if source.image_tokens is not None:
        return {"image_tokens": source.image_tokens}
    return {} if source.detail == "auto" else {"detail": source.detail}
