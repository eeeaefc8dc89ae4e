"""The body of a request, checked field by field. Fields that vtx does not support are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from vtx.runtime.api.messages import split_images
from vtx.runtime.api.options import DEFAULT, K, Options, Settings
from vtx.runtime.bundle.safetensors import parse_json, shown
from vtx.runtime.checks import check_text, check_whole
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import Guide
from vtx.runtime.prompt.messages import Message, with_tools
from vtx.runtime.prompt.tools import Tools
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.remote import RemoteImage, remote_image
from vtx.runtime.session.sampling import Sampling
from vtx.runtime.vision.video import Video

T = TypeVar("T")
S = TypeVar("S", Options, Sampling)
ADDED = ("min_p", "presence_penalty", "frequency_penalty", "logit_bias")
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of OpenAI's responses that the reply repeats.
REPEATED = ("instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "metadata", "max_output_tokens",
            "encoding_format")  # fmt: skip
# Fields of OpenAI's API without a meaning here, whatever their value.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
GUIDED = {  # vLLM's fields
    "guided_json": "schema", "guided_choice": "choices", "guided_regex": "regex", "guided_grammar": "grammar",
}  # fmt: skip
# Fields that may be given with the value that changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "echo": (False,), "best_of": (1,), "suffix": ("",),
    "truncation": ("disabled",), "background": (False,), "include": ([],),
}  # fmt: skip
Translate = Callable[[dict[str, Any]], dict[str, Any]]


class RawPrompt(str):
    """In place of messages: a prompt that no template prints, its control tokens included."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request: `messages`, and their `images` and videos in order, as data URLs or images still to be fetched.

    `reuse`: start from the caches of earlier requests. `n`: answers. `notes`: differences to what was asked for, which
    the reply has: fields that were `ignored`, and `max_tokens` if it is less. `deadline`: seconds from its arrival to
    its end, None: the server's limit. `form`: the field that gives the form of the answer. `fields`: those of the body
    that a reply repeats.
    """

    model: str
    messages: list[Message]
    images: tuple[str | bytes | RemoteImage | Video, ...]
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

    @property
    def adapts(self) -> bool:
        """True if K and reductions may be chosen so that its deadline is kept: it names neither."""
        return self.deadline is not None and self.k == self.reduce == DEFAULT

    def settings(self, number: int = 0) -> Settings:
        """The settings of its answer `number`; with a seed, that of each answer is one more."""
        seed = self.options.sampling.seed
        sampling = replace(self.options.sampling, seed=None if seed is None else seed + number)
        return Settings(self.k, replace(self.options, timeout=None, sampling=sampling), self.reduce)


def read_request(
    body: bytes,
    limits: Limits,
    hosts: Collection[str] = (),
    *,
    lenient: bool = False,
    translate: Translate | None = None,
) -> ChatRequest:  # fmt: skip
    """The request that a body holds; images may be at addresses of `hosts`. Raises Refusal for anything else.

    `translate` makes the fields of a chat completion of another address's. A `lenient` server ignores fields and values
    that it does not support, and says so.
    """
    data = parse_json(body, "the body", error=RequestError)
    if not isinstance(data, dict):
        raise Refusal(400, f"the body is {type(data).__name__}, not an object; send a request as OpenAI's API has it")
    present = {name: value for name, value in data.items() if value is not None}
    given, present = present, translate(present) if translate is not None else dict(present)
    ignored = list[str]()
    for name in sorted(set(present) & set(NEUTRAL)):
        value = present.pop(name)
        if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in NEUTRAL[name]):
            ignored.append(name)
            if lenient:
                continue
            raise Refusal(
                400, f"{name} is {value!r:.40}, which vtx does not support; leave it out", code="unsupported_value",
                param=name,
            )  # fmt: skip
    fields = _Fields({name: value for name, value in present.items() if name not in IGNORED})
    model: str = fields.need("model", partial(check_text, "model"))
    images, messages = fields.need("messages", lambda value: _messages(value, limits, hosts))
    tokens = fields.take("max_tokens", Options().max_new_tokens, _tokens)
    tokens = fields.take("max_completion_tokens", tokens, _tokens)
    options = Options(
        max_new_tokens=tokens,
        ignore_eos=fields.flag("ignore_eos"),
        sampling=fields.checked(Sampling(), "temperature", "top_p", "top_k", "seed", "repetition_penalty", *ADDED),
        timeout=limits.seconds,
    )
    options = fields.checked(
        replace(options, logprobs=fields.flag("logprobs")),
        "gate_threshold",
        "stop",
        "top_logprobs",
        "about",
        "priority",
    )
    none: tuple[Guide, ...] = ()
    guides = {"response_format": fields.take("response_format", none, _response_format), "tools": _tools(fields)}
    guides |= {name: fields.take(name, none, partial(_guides, kind)) for name, kind in GUIDED.items()}
    forms = [(name, guide) for name, several in guides.items() for guide in several]
    form, guide = forms[0] if forms else (None, None)
    if len(forms) > 1:
        names = " and ".join(name for name, _ in forms)
        raise Refusal(
            400, f"{names} are given, each a form of the answer; give one", code="invalid_value", param=forms[1][0]
        )
    if guide is not None:
        try:
            options = replace(options, guide=guide)
        except RequestError as e:
            raise Refusal(400, str(e), code="invalid_value", param=form) from e
    messages = with_tools(messages, [] if guide is None else guide.listed_tools)
    stream = fields.flag("stream")
    stream_options: dict[str, bool] = fields.take(
        "stream_options", {}, lambda value: _stream_options(value, stream=stream)
    )
    k, reduce = fields.take("k", DEFAULT, _k), fields.take("reduce", DEFAULT, partial(check_text, "reduce"))
    reuse = fields.flag("reuse", default=True)
    deadline: int | None = fields.take("deadline_ms", None, partial(check_whole, "deadline_ms", least=0))
    most = min(limits.parallel, limits.new_tokens)
    n: int = fields.take("n", 1, lambda value: check_whole("n", value, 1, most))
    ignored += sorted(map(shown, fields.left))
    if fields.left and not lenient:
        name = min(fields.left)
        raise Refusal(400, f"there is no field {shown(name)}; leave it out", code="unknown_parameter", param=name[:80])
    usage = bool(stream_options.get("include_usage"))
    notes: dict[str, Any] = {"ignored": ignored} if ignored else {}
    if tokens > limits.new_tokens:
        options, notes = replace(options, max_new_tokens=limits.new_tokens), {**notes, "max_tokens": limits.new_tokens}
    seconds = None if deadline is None else deadline / 1000
    return ChatRequest(
        model, messages, tuple(images), k, reduce, options, stream, usage, reuse, n, notes, seconds, form,
        lenient, {name: given[name] for name in REPEATED if name in given},
    )  # fmt: skip


class _Fields:
    """The fields of a body, each taken once; an error names the field. `left`: those not taken."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.left = fields

    def take(self, name: str, default: T, check: Callable[[Any], T | None]) -> T:
        """The value of a field, or what `check` makes of it; `default` if it is not given."""
        if name not in self.left:
            return default
        value: T = self.left.pop(name)
        try:
            checked = check(value)
        except Refusal:
            raise
        except RequestError as e:
            raise Refusal(400, str(e), code="invalid_value", param=name) from e
        return value if checked is None else checked

    def need(self, name: str, check: Callable[[Any], T | None]) -> T:
        if name not in self.left:
            raise Refusal(400, f"the request has no {name}; add it", code="missing_required_parameter", param=name)
        default: T = self.left[name]
        return self.take(name, default, check)

    def flag(self, name: str, *, default: bool = False) -> bool:
        return self.take(name, default, lambda value: _flag(name, value))

    def checked(self, settings: S, *names: str) -> S:
        """`settings`, which check themselves, with those of these fields that are given."""
        for name in names:
            settings = self.take(name, settings, partial(_changed, settings, name))
        return settings


def _tokens(value: Any) -> None:
    check_whole("the number of tokens", value, 1)


def _changed(settings: S, name: str, value: Any) -> S:
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(token.isdecimal() and len(token) < 12 for token in value):
            raise RequestError(f'logit_bias is {value!r:.40}; it must be an object of token ids, {{"15": -100}}')
        value = tuple((int(token), bias) for token, bias in value.items())
    return replace(settings, **{name: value})


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.40}; it must be true or false")


def _k(value: Any) -> None:
    if isinstance(value, bool) or not (isinstance(value, int) or value in ("none", "auto", DEFAULT)):
        raise RequestError(f'k is {value!r:.40}; it must be a whole number, "none", "auto" or "default"')


def _guides(kind: str, value: Any) -> tuple[Guide, ...]:
    return (Guide(**{kind: value}),)


def _tools(fields: _Fields) -> tuple[Guide, ...]:
    """The calls that the fields of tools allow or ask for; none if there are to be none."""
    if fields.left.get("tools") == []:
        del fields.left["tools"]
    functions: Any = fields.take("tools", None, lambda value: Guide(tools=value) and value)
    parallel = fields.flag("parallel_tool_calls", default=True)

    def chosen(value: Any) -> Any:
        named = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        choice = named.get("name") if isinstance(named, dict) else value
        if choice == "none" or (functions is None and choice == "auto"):
            return ""
        if functions is None or not isinstance(choice, str):
            raise RequestError(
                f'tool_choice is {value!r:.60}; it must be "none", "auto" or "required" next to tools, or '
                '{"type": "function", "function": {"name": ...}}'
            )
        return Tools(functions, choice, parallel)

    tools = fields.take("tool_choice", None if functions is None else Tools(functions, "auto", parallel), chosen)
    return (Guide(tools=tools),) if tools else ()


def _response_format(value: Any) -> tuple[Guide, ...]:
    """The form that OpenAI's field asks for; none for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    given = value.get("json_schema") if kind == "json_schema" else None
    if kind == "json_object":
        return (Guide(schema={"type": "object"}),)
    if kind == "json_schema" and isinstance(given, dict) and given.get("schema") is not None:
        return (Guide(schema=given["schema"]),)
    if kind != "text":
        raise RequestError(
            f"response_format is {value!r:.60}; its type must be text, json_object or json_schema, the last with "
            '"json_schema": {"schema": {...}}'
        )
    return ()


def _stream_options(value: Any, *, stream: bool) -> None:
    if not stream or not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise RequestError('stream_options must be {"include_usage": true or false}, with "stream": true')
    for name, flag in value.items():
        _flag(name, flag)


def _messages(value: Any, limits: Limits, hosts: Collection[str]) -> tuple[list[Any], list[Message]]:
    """The images and messages of OpenAI's form; images as data URLs, or at addresses of `hosts`."""
    if isinstance(value, RawPrompt):
        return [], [{"role": "prompt", "content": str(value)}]
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list that ends with the user's question")
    cleaned = list[dict[str, Any]]()
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RequestError(f"a message must be an object with a role of {', '.join(ROLES)}; got {message!r:.80}")
        content = message.get("content")
        if content is None and message["role"] == "assistant":
            content = ""
        others = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
        if isinstance(content, list):
            content = [_part(part, hosts) for part in content]
        cleaned.append({"role": message["role"], "content": content, **others})
    last = cleaned[-1]
    ends = last["role"] in ("user", "assistant", "tool") and not last.get("tool_calls")
    if not ends or all(turn["role"] != "user" for turn in cleaned):
        raise RequestError(
            "the last message must be the user's question, a tool's result, or the beginning of the answer: role "
            "'user', 'tool', or 'assistant' without calls"
        )
    images, messages = split_images(cleaned)
    if len(images) > limits.images:
        raise Refusal(
            413, f"{len(images)} images and videos are given, the limit of this server is {limits.images}; send fewer",
            code="too_many_images", param="messages",
        )  # fmt: skip
    return images, messages


def _part(part: Any, hosts: Collection[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image_url", "video_url"):
        raise RequestError(f"a part of a message must be of type text, image_url or video_url; got {part!r:.80}")
    source = part.get(kind)
    url = source.get("url") if isinstance(source, dict) else source
    if kind == "video_url":
        if not isinstance(url, str) or url[:5].lower() != "data:":
            raise RequestError(
                f"a video must be a data URL, data:video/mp4;base64,...; got {url!r:.80}. This server fetches no "
                "videos and opens no files"
            )
        frames = source.get("frames") if isinstance(source, dict) else None
        return {"type": "video_url", "video_url": {"url": url, "frames": frames}}
    if hosts and isinstance(url, str) and url[:5].lower() != "data:":
        return {"type": "image", "image": remote_image(url, hosts)}
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise RequestError(
            f"an image must be a data URL, data:image/jpeg;base64,...; got {url!r:.80}. This server fetches no "
            "addresses and opens no files"
        )
    return {"type": "image_url", "image_url": {"url": url}}
