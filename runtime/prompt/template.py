"""A chat template in jinja2's sandbox.

The cost of an untrusted template is tested by `vtx-export`, in a confined process. A bundle is trusted like a program,
so only cheap limits are applied here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vtx.runtime.errors import TemplateError

MAX_SOURCE = 128 << 10  # characters; the longest templates in use have about 30,000
MAX_OUTPUT = 4 << 20  # characters
MAX_PRODUCT = 1 << 20  # characters or items that `*` makes, bits of a number that `*` or `**` makes
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
            self._compiled = _Environment(now).from_string(source)
        except Exception as error:
            raise TemplateError(f"the chat template cannot be compiled: {_one_line(error)}; {CURE}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str], *, add_generation_prompt: bool
    ) -> str:
        """The conversation as text; `variables` are the special tokens by name.

        Raises `TemplateError` when the template refuses the conversation, fails, or prints too much.
        """
        given: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, **variables}
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
