"""A chat template in jinja2's sandbox, and messages in the shape that it reads.

The cost of an untrusted template is tested by `vtx-export`, in a confined process. A bundle is trusted like a program,
so only cheap limits are applied here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vtx.runtime.bundle.spec.text_settings import ROLES, TextSettings
from vtx.runtime.errors import RequestError, TemplateError
from vtx.runtime.prompt.messages import Message, Part, with_tools
from vtx.runtime.prompt.tools import FORMS, CallForm, ToolCall

MAX_SOURCE = 128 << 10  # characters; the longest templates in use have about 30,000
MAX_OUTPUT = 4 << 20  # characters
MAX_PRODUCT = 1 << 20  # characters or items that `*` makes, bits of a number that `*` or `**` makes
_PROBE = "vtx-probe-7f3a"
CURE = "give another one with vtx-export --chat-template FILE"


class LimitError(TemplateError):
    """A chat template is too long, or makes more than the sandbox allows."""


class ChatTemplate:
    """A compiled chat template with the filters, blocks and globals that transformers gives one; safe for many threads.

    `now` is the date that it prints. Raises `TemplateError` when the source is too long or is not a template.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_SOURCE:
            raise LimitError(f"the chat template has {len(source):,} characters, the limit is {MAX_SOURCE:,}; {CURE}")
        try:
            environment = _Environment(now)
            names = environment.make_globals(None)
            self._compiled = environment.template_class.from_code(environment, _code(source), names)
        except Exception as error:
            raise TemplateError(f"the chat template cannot be compiled: {_one_line(error)}; {CURE}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, str | bool],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text; `variables` are the special tokens by name.

        Raises `TemplateError` when the template refuses the conversation, fails, or prints too much.
        """
        given: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None, **variables}
        chunks, length = list[str](), 0
        try:
            for chunk in self._compiled.generate(**given, add_generation_prompt=add_generation_prompt):
                chunks.append(chunk)
                length += len(chunk)
                if length > MAX_OUTPUT:
                    break
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template fails: {_one_line(error)}; {CURE}") from error
        if length > MAX_OUTPUT:
            raise LimitError(f"the chat template prints more than {MAX_OUTPUT:,} characters; {CURE}")
        return "".join(chunks)


class ShapingTemplate:
    """A chat template that takes content of either shape. Raises `TemplateError` when the template cannot be used.

    Some templates read content as a string, some as parts, some both, and what they cannot read they drop or print as
    Python. So each role is tried in both shapes when it is first used, and messages are given in the one that works.
    """

    def __init__(self, source: str, settings: TextSettings, now: Callable[[], datetime] = datetime.now) -> None:
        self._template, self._settings, self._variables = ChatTemplate(source, now), settings, settings.variables()
        self._tried: dict[str, tuple[bool, bool]] = {}
        self._reads("user")  # a template that cannot be used is refused here

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises `TemplateError`."""
        head: Mapping[str, Any] = messages[0] if messages and messages[0]["role"] == "tools" else {}
        variables = {**self._variables, **({"enable_thinking": head["thinking"]} if "thinking" in head else {})}
        shaped = list(map(self._shape, messages[1:] if head else messages))
        return self._template.render(
            shaped, variables, add_generation_prompt=add_generation_prompt, tools=head.get("tools")
        )

    @cached_property
    def switches_thinking(self) -> bool:
        """True if it has a switch for thoughts before an answer: the variable `enable_thinking`."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        prompts = {self.render(with_tools(question, [], on), add_generation_prompt=True) for on in (True, False)}
        return len(prompts) > 1

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which it prints calls of tools. Raises `RequestError` if it knows no tools, or another form."""
        call = {"id": "probe1234", "type": "function", "function": {"name": _PROBE, "arguments": {"a": 1}}}
        tool = {"type": "function", "function": {"name": _PROBE, "parameters": {"type": "object", "properties": {}}}}
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            listed, without = (
                self.render(with_tools(question, tools), add_generation_prompt=True) for tools in ([tool], [])
            )
            turns = [*question, Message(role="assistant", content="", tool_calls=[call])]
            printed = self.render(with_tools(turns, [tool]), add_generation_prompt=False)
        except TemplateError:
            listed = without = printed = ""
        if _PROBE not in listed or _PROBE in without:
            raise RequestError(
                "this model's chat template knows no tools; leave them out, or export with a --chat-template that does"
            )
        for form in FORMS:
            if form.text(ToolCall(_PROBE, json.dumps({"a": 1}))) in printed:
                return form
        raise RequestError("this model's chat template writes calls of tools in a form that vtx does not know")

    def _reads(self, role: str) -> tuple[bool, bool]:
        """True if the template reads a role's content as parts, and as a string; tried at the first use."""
        if role not in self._tried:
            image: list[Part] = [{"type": "image"}] if role == "user" else []
            parts = self._try(role, [*image, {"type": "text", "text": _PROBE}])
            reads_parts = _PROBE in parts and not re.search("""['"]type['"]""", parts)
            reads_parts = reads_parts and parts.count(self._settings.image_token) == len(image)
            self._tried[role] = reads_parts, _PROBE in self._try(role, _PROBE)
        return self._tried[role]

    def _try(self, role: str, content: str | Sequence[Part]) -> str:
        chat: list[Message] = [{"role": role, "content": content}]
        if role != "user":
            chat.insert(0 if role == "assistant" else 1, self._shape({"role": "user", "content": "?"}))
        try:
            return self._template.render(chat, self._variables, add_generation_prompt=False)
        except LimitError:
            raise
        except TemplateError:
            return ""

    def _shape(self, message: Message) -> Message:
        content = message["content"]
        reads_parts, reads_strings = self._reads(message["role"]) if message["role"] in ROLES else (True, True)
        if isinstance(content, str) and reads_parts and not reads_strings:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and reads_strings and not reads_parts:
            tokens = {"image": f"{self._settings.image_token}\n", "video": f"{self._settings.video_token}\n"}
            content = "".join(part["text"] if part["type"] == "text" else tokens[part["type"]] for part in content)
        return {**message, "content": content}


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(f"the chat template refuses this conversation: {' '.join(str(message).split())[:300]}")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012, jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(16)
def _code(source: str) -> CodeType:
    """A template compiled, which takes as long as all else of it: whoever loads a model twice need not wait twice."""
    return _Environment(datetime.now).compile(source)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox as transformers sets it up, without random functions."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        for name in ("lipsum", "cycler"):
            del self.globals[name]
        del self.filters["random"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: now().strftime(str(pattern)),
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            size = bits * max(right, 1) if operator == "**" else bits + right.bit_length()
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(sequence, (str, bytes, list, tuple)):
                size = len(sequence) * times
        if size > MAX_PRODUCT:
            raise SecurityError(f"{operator} makes more than {MAX_PRODUCT:,} characters, items or bits")
        return super().call_binop(context, operator, left, right)
