"""A chat template is a stranger's program: it runs in a sandbox that counts what it makes and how long it takes."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_environment
from jinja2.visitor import NodeTransformer

from vtx.runtime.errors import TemplateError

MAX_SOURCE = 128 << 10  # characters; the longest templates in use have about 30,000
MAX_NODES = 16_000  # of the syntax tree; compiling takes about 50 us for each
MAX_OUTPUT = 4 << 20  # characters
MAX_WORK = 16 << 20  # characters made on the way, an item or a turn of a loop counting ITEM
MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine changes nothing
ITEM = 16
MAX_INT_BITS = 4096


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CONTAINERS: Any = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_STR_METHODS = _names(
    "strip lstrip rstrip split rsplit splitlines startswith endswith upper lower title capitalize find rfind index "
    "rindex count replace removeprefix removesuffix join partition rpartition isdigit isalpha isalnum isspace isupper "
    "islower isnumeric isdecimal istitle"
)
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, _names("get items keys values")),
    ((list, tuple, range), _names("index count grouper list")),  # the last two: groupby's pairs
    ((int, float, bytes, complex), frozenset()),
)
_FILTERS = _names(
    "abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject "
    "rejectattr reverse select selectattr sort string title unique upper"
)
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[#0\- +]*(\d{4,}|\*|\d*\.(\d{4,}|\*))")
_WIDE_DATE = re.compile(r"%[-_^#]*\d")


class LimitError(TemplateError):
    """A chat template makes or takes more than the sandbox grants."""


class ChatTemplate:
    """A compiled chat template with the filters, blocks and globals that transformers gives one; safe for many threads.

    Raises `TemplateError` when the source is too long or is not a template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise LimitError(f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE}; {_CURE}")
        try:
            self._compiled = _Environment().from_string(source)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template cannot be compiled: {_one_line(error)}; {_CURE}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str], *, add_generation_prompt: bool
    ) -> str:
        """The conversation as text; `variables` are the special tokens by name.

        Raises `TemplateError` when the template refuses the conversation, fails, or goes beyond a limit.
        """
        token = _budget.set(_Budget())
        try:
            return self._collect(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template fails: {_one_line(error)}; {_CURE}") from error
        finally:
            _budget.reset(token)

    def _collect(self, **variables: object) -> str:
        chunks, length = [], 0
        for chunk in self._compiled.generate(**variables):
            length += len(chunk)
            if length > MAX_OUTPUT:
                raise LimitError(f"the chat template prints more than {MAX_OUTPUT} characters; {_CURE}")
            chunks.append(chunk)
        return "".join(chunks)


_CURE = "give another one with vtx-export --chat-template FILE"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class _Budget:
    """What one rendering may still make and take."""

    def __init__(self) -> None:
        self.units = MAX_WORK
        self.deadline = time.thread_time() + MAX_SECONDS

    def spend(self, units: int) -> None:
        self.units -= max(units, 0)
        if self.units < 0:
            raise LimitError(f"the chat template makes more than {MAX_WORK} characters and items on the way; {_CURE}")
        if time.thread_time() > self.deadline:
            raise LimitError(f"the chat template takes more than {MAX_SECONDS:g} s; {_CURE}")


# Not set while a template is compiled: a filter on constants then fails to fold and is run, counted, when rendering.
_budget: ContextVar[_Budget] = ContextVar("vtx_template_budget")


def _size(value: object) -> int:
    """Characters and items of a value, shared parts counted each time, as printing or comparing would walk them."""
    total, stack, limit = 0, [value], _budget.get().units
    while stack and total <= limit:
        item = stack.pop()
        total += ITEM
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 8
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, _CONTAINERS):
            stack.extend(item)
    return total


def _charge(value: Any) -> Any:
    """The value, paid for; a lazy sequence becomes a list, so that nothing runs uncounted later."""
    if isinstance(value, Iterator):
        value = list(_each(value))
    _budget.get().spend(_size(value))
    return value


def _each(items: Iterable[Any], cost: int = ITEM) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.spend(cost)
        yield item


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        return _charge(function(*args, **kwargs))

    return charged


def _concat(values: Sequence[object]) -> str:
    return "".join(map(str, values))


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _budget.get().spend(text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join(separator: str, values: Iterable[Any]) -> str:
    items = list(_each(values))
    _budget.get().spend(_size(items) + len(separator) * len(items))
    return separator.join(items)


@pass_environment
def _join_filter(environment: _Environment, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    return _join(str(d), map(str, _attributes(environment, values, attribute)))


@pass_environment
def _sum(environment: _Environment, values: Iterable[Any], attribute: str | None = None, start: float = 0) -> float:
    if not isinstance(start, (int, float)):
        raise SecurityError("sum() of anything but numbers")
    return sum(_each(_attributes(environment, values, attribute)), start)


def _attributes(environment: _Environment, values: Iterable[Any], attribute: str | None) -> Iterable[Any]:
    return values if attribute is None else map(make_attrgetter(environment, attribute), values)


def _strip(text: object, chars: str | None = None) -> str:
    return str(text).strip(_few(chars))


def _few(chars: str | None) -> str | None:
    if chars is not None and len(chars) > 256:
        raise SecurityError("more than 256 characters to strip")
    return chars


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _budget.get().spend((text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
    return str(FILTERS["indent"](text, width, first, blank))


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > 20:
        raise SecurityError("round() to more than 20 places")
    return FILTERS["round"](value, precision, method)


def _format(pattern: object, *args: object, **kwargs: object) -> str:
    return _modulo(str(pattern), kwargs or args)


def _modulo(pattern: str, values: Any) -> str:
    if _WIDE_FORMAT.search(pattern):
        raise SecurityError("a format wider than 999 characters")
    _budget.get().spend(len(pattern) + pattern.count("%") * (1000 + _size(values)))
    text: str = pattern % values
    return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (indent is not None and not 0 <= int(indent) <= 16) or len("".join(separators or ())) > 16:
        raise SecurityError("tojson() with an indent or separators beyond 16 characters")
    _budget.get().spend(_size(value) * (1 + (indent or 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(f"the chat template refuses this conversation: {' '.join(str(message).split())[:300]}")


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256 or _WIDE_DATE.search(pattern):
        raise SecurityError("strftime_now() with a width, or of more than 256 characters")
    return datetime.now().strftime(pattern)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Variables(Namespace):
    """`namespace()`: names with a leading underscore are refused, and it prints as a word, whatever it holds."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _make_namespace(*args: Any, **kwargs: Any) -> _Variables:
    variables = _Variables()
    for name, value in dict(*args, **kwargs).items():
        variables[name] = value
    return variables


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it only is a scope."""

    tags = {"generation"}  # noqa: RUF012, jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _through(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _Meter(NodeTransformer):
    """Leads whatever jinja does on its own (loops, literals, slices, comparisons, `~`) through the budget."""

    def __init__(self) -> None:
        self.nodes = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise LimitError(f"the chat template has more than {MAX_NODES} expressions and statements; {_CURE}")
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("recursive loops")
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _through(" each", node.iter, nodes.Const(ITEM + text))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(" concat", nodes.List(node.nodes, lineno=node.lineno))  # charged as a filter's result

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._value(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(" value", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError("autoescape")

    def _value(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _through(" value", node)

    visit_List = visit_Dict = visit_Compare = visit_Test = _value


@pass_context
def _printed(context: Context, value: Any) -> Any:
    _budget.get().spend(_size(value))
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox: attributes by allow-list, every call, operator, filter, literal and turn of a loop counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], finalize=_printed
        )
        own = {
            "format": _format,
            "indent": _indent,
            "join": _join_filter,
            "replace": _replace,
            "round": _round,
            "safe": str,
            "sum": _sum,
            "tojson": _tojson,
            "trim": _strip,
            " concat": _concat,
        }
        filters = {name: FILTERS[name] for name in _FILTERS} | own
        self.filters = {name: _limited(function) for name, function in filters.items()}
        self.filters |= {" each": _each, " value": _charge}
        for name in ("lipsum", "cycler"):
            del self.globals[name]
        self.globals |= {
            "dict": _make_dict,
            "namespace": _make_namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Meter().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS:
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format")
        return None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return _charge(_modulo(left, right))
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        return _charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend(_size((args, kwargs)))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return _charge(_replace(owner, *args, **kwargs))
        if isinstance(owner, str) and name == "join":
            return _charge(_join(owner, *args))
        if isinstance(owner, str) and name.endswith("strip"):
            _few(*args or (None,))
        return _charge(super().call(__context, __obj, *args, **kwargs))


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise LimitError(f"the chat template makes a number of {bits} bits, the limit is {MAX_INT_BITS}; {_CURE}")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, (str, list, tuple)):
            _budget.get().spend(_size(sequence) * times)
