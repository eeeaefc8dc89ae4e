"""Chat templates whose prompts are proven by a finite number of conversations.

A template is accepted if nothing in its syntax tree lets the prompt depend on the contents of a text (except that it is
empty or blank), on a number greater than `MOST`, or on a variable that is carried from one message to the next. What it
prints around a text then depends on roles, types of parts, being among the first or last messages or parts, and parity;
`vtx.exporter.checkpoint.forms` tries all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jinja2 import nodes

from vtx.runtime.bundle.spec.text_settings import ROLES
from vtx.runtime.prompt.template import parse_template

MOST = 1  # the largest number that a count or an index may be compared with
MAX_SLICES = 2  # of the messages; each moves indices by one

# "fixed" has a few values without text in them, "role" is a message's, "state" can have any value.
Kind = Literal["fixed", "role", "count", "state", "text", "content", "part", "parts", "message", "messages"]
_ELEMENTS: Final[dict[str, Kind]] = {"messages": "message", "parts": "part", "content": "part"}
_FIELDS: Final[dict[str, dict[str, Kind]]] = {
    "message": {"role": "role", "content": "content"},
    "part": {"type": "fixed", "text": "text"},
}
_COUNTS = ("index", "index0", "revindex", "revindex0", "length")  # of a loop
_GIVEN = ("add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token", "image_token", "video_token")
_NONE = ("tools", "documents")  # variables that are always None
_FUNCTIONS = ("range", "dict", "joiner", "namespace", "raise_exception", "strftime_now")
_OF_FIXED = ("upper", "lower", "capitalize", "title", "replace", "startswith", "endswith", "tojson", "join", "length")
_STRIPS = ("strip", "lstrip", "rstrip")
_TESTS = ("none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false")
_COMPARING = {"equalto": "eq", "eq": "eq", "==": "eq", "ne": "ne", "!=": "ne", "in": "in"}
_ARITHMETIC = (nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.Neg, nodes.Pos)

_UNKNOWN: Final[Any] = object()
_MISSING: Final[Any] = object()  # the value of a name or field that no conversation has


class UnprovenError(Exception):
    """The part of a template that a finite number of conversations cannot prove."""


@dataclass(frozen=True, slots=True)
class _Value:
    """The kinds that an expression can have, and its value if constant."""

    kinds: frozenset[Kind]
    constant: Any = _UNKNOWN

    @property
    def truth(self) -> bool | None:
        if self.constant is _UNKNOWN:
            return None
        return self.constant is not _MISSING and bool(self.constant)

    @property
    def is_fixed(self) -> bool:
        return self.kinds <= {"fixed", "role"}


def _value(*kinds: Kind) -> _Value:
    return _Value(frozenset(kinds))


def _union(*values: _Value) -> _Value:
    return _Value(frozenset().union(*(value.kinds for value in values)))


def _constant(value: Any) -> _Value:
    return _Value(frozenset({"fixed"}), value)


_FIXED, _TEXT, _STATE = _value("fixed"), _value("text"), _value("state")
_ABSENT = _constant(_MISSING)


def check_provable(source: str) -> None:
    """Raises `UnprovenError` for a template that conversations cannot prove, `TemplateError` for an invalid one."""
    tree = parse_template(source)
    names: dict[str, _Value] = {}
    while True:  # assignments make more of a template reachable, which can assign more
        reading = _Reading(dict(names))
        reading.statements(tree.body)
        if reading.names == names:
            return
        names = reading.names


class _Reading:
    """One pass over the reachable part of a syntax tree, with all values that `names` may have."""

    def __init__(self, names: dict[str, _Value]) -> None:
        self.names = names  # of variables, and of a namespace's fields as "name.field"
        self._slices = 0
        self._values: dict[int, _Value] = {}
        self._loops: list[tuple[_Value, bool]] = []  # the iterables of the enclosing loops; True if nothing is filtered

    def statements(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output(nodes=children):
                    for child in children:
                        kinds = frozenset() if isinstance(child, nodes.TemplateData) else self._of(child).kinds
                        if kinds & {"count", "state"}:
                            raise UnprovenError("it prints a number or a variable that changes from message to message")
                        if kinds & {"message", "messages", "part", "parts"}:
                            raise UnprovenError("it prints messages or parts as a whole")
                case nodes.If():
                    for branch in (node, *node.elif_):
                        truth = self._condition(branch.test)
                        if truth is not False:
                            self.statements(branch.body)
                        if truth is True:
                            break
                    else:
                        self.statements(node.else_)
                case nodes.For():
                    self._loop(node)
                case nodes.Assign(target=target, node=expression):
                    self._assign(target, expression)
                case nodes.AssignBlock(target=nodes.Name(name=name), filter=None, body=body):
                    self.statements(body)
                    self._keep(name, _value("fixed", "text"))
                case nodes.Scope(body=body):
                    self.statements(body)
                case nodes.Continue():
                    pass
                case _:
                    raise UnprovenError(f"it has a statement of the kind {type(node).__name__}")

    def _loop(self, node: nodes.For) -> None:
        over = self._of(node.iter)
        if node.recursive or not isinstance(node.target, nodes.Name):
            raise UnprovenError("it has a loop that is recursive or has several variables")
        if over.truth is False and not node.else_:
            return
        if not over.kinds <= {"fixed", "role", *_ELEMENTS}:
            raise UnprovenError("it has a loop over something other than messages, parts and constants")
        self._keep(node.target.name, _elements(over))
        if node.test is not None:
            self._condition(node.test)
        self._loops.append((over, node.test is None))
        self.statements(node.body)
        self._loops.pop()
        self.statements(node.else_)

    def _assign(self, target: nodes.Node, expression: nodes.Node) -> None:
        match target, expression:
            case nodes.NSRef(name=name, attr=attr), _:
                self._of(expression)
                self._keep(f"{name}.{attr}", _STATE)
            case nodes.Name(name=name), nodes.Call(node=nodes.Name(name="namespace"), args=[], kwargs=fields):
                self._keep(name, _STATE)
                for field in fields:
                    self._keep(f"{name}.{field.key}", self._of(field.value))
            case nodes.Name(name=name), _:
                value = self._of(expression)
                if "state" in value.kinds:  # a second name for a namespace would hide what is assigned to its fields
                    raise UnprovenError(f"it keeps a number, or a namespace, in {name}")
                self._keep(name, value)
            case _:
                raise UnprovenError("it assigns to several names")

    def _keep(self, name: str, value: _Value) -> None:
        if name == "loop":
            raise UnprovenError("it has a variable of the name loop")
        self.names[name] = _union(value, self.names.get(name, _value()))

    def _condition(self, node: nodes.Node) -> bool | None:
        """The expression's truth as a condition, None if it depends on the conversation."""
        value = self._of(node)
        if "state" in value.kinds:
            raise UnprovenError("it has a condition on a variable that changes from message to message")
        return value.truth

    def _of(self, node: nodes.Node) -> _Value:
        """The possible values of an expression; each is read once, whatever its surroundings."""
        if id(node) not in self._values:
            self._values[id(node)] = self._find(node)
        return self._values[id(node)]

    def _find(self, node: nodes.Node) -> _Value:
        match node:
            case nodes.Const(value=value):
                return _constant(value)
            case nodes.Name(name=name):
                given = [_value("messages")] if name == "messages" else [_FIXED] if name in _GIVEN else []
                if name in self.names:
                    return _union(self.names[name], *given)
                if name in _FUNCTIONS or name == "loop":
                    return _STATE
                return given[0] if given else _constant(None) if name in _NONE else _ABSENT
            case nodes.Getattr(node=of, attr=str(field)) | nodes.Getitem(node=of, arg=nodes.Const(value=str(field))):
                return self._field(of, field)
            case nodes.Getitem():
                return self._item(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Test():
                return self._test(node)
            case nodes.Compare(expr=left, ops=ops):
                values = []
                for operand in ops:
                    values.append(self._compare(left, operand.op, operand.expr))
                    left = operand.expr
                return values[0] if len(values) == 1 else _FIXED
            case nodes.Not(node=of):
                truth = self._condition(of)
                return _FIXED if truth is None else _constant(not truth)
            case nodes.And(left=left, right=right) | nodes.Or(left=left, right=right):
                first, truth = self._of(left), self._condition(left)
                if truth is isinstance(node, nodes.Or):
                    return first
                second = self._of(right)
                if truth is None and isinstance(node, nodes.And) and second.truth is False and first.is_fixed:
                    return _constant(False)
                return second if truth is not None else _union(first, second)
            case nodes.CondExpr(test=test, expr1=then, expr2=other):
                truth = self._condition(test)
                options = [expression for expression, skipped in ((then, False), (other, True)) if truth is not skipped]
                values = [_ABSENT if option is None else self._of(option) for option in options]
                return values[0] if len(values) == 1 else _union(*values)
            case nodes.Call():
                return self._call(node)
            case nodes.Concat(nodes=operands):
                return self._join([self._of(operand) for operand in operands])
            case nodes.Add(left=left, right=right):
                return self._join([self._of(left), self._of(right)])
            case nodes.List(items=items) | nodes.Tuple(items=items):
                return self._only_fixed("a list", *items)
            case nodes.Mod(left=left, right=nodes.Const(value=2)) if self._of(left).kinds <= {"count"}:
                return _FIXED
        if isinstance(node, _ARITHMETIC):
            values = [self._of(child) for child in node.iter_child_nodes()]
            if all(value.kinds <= {"fixed", "role", "count", "state"} for value in values):
                return _FIXED if all(value.is_fixed for value in values) else _STATE
        raise UnprovenError(f"it has an expression of the kind {type(node).__name__}")

    def _field(self, node: nodes.Node, field: str) -> _Value:
        if isinstance(node, nodes.Name):
            if node.name == "loop" and self._loops:
                if field in ("first", "last", *_COUNTS):
                    return _value("count" if field in _COUNTS else "fixed")
                if field in ("previtem", "nextitem"):
                    return _union(_elements(self._loops[-1][0]), _FIXED)
                raise UnprovenError(f"it uses loop.{field}")
            if self.names.get(node.name) == _STATE:
                return self.names.get(f"{node.name}.{field}", _STATE)
        of = self._of(node)
        if of.kinds & {"messages", "parts", "count"} or any(hasattr(kind, field) for kind in (dict, list, str)):
            raise UnprovenError(f"it uses {field} of a value")
        if "state" in of.kinds:
            return _STATE
        found = [_value(_FIELDS[kind][field]) if field in _FIELDS.get(kind, ()) else _ABSENT for kind in of.kinds]
        return found[0] if len(found) == 1 else _union(*found)

    def _item(self, node: nodes.Getitem) -> _Value:
        of = self._of(node.node)
        match node.arg:
            case nodes.Const(value=int(index)) | nodes.Neg(node=nodes.Const(value=int(index))) if index <= MOST:
                if of.kinds <= {"fixed", "role", *_ELEMENTS}:
                    return _elements(of)
            case nodes.Slice(start=nodes.Const(value=1), stop=None, step=None) if of.kinds == {"messages"}:
                self._slices += 1
                if self._slices <= MAX_SLICES:
                    return of
            case nodes.Add(left=base, right=nodes.Const(value=1)) | nodes.Sub(left=base, right=nodes.Const(value=1)):
                over, whole = self._loops[-1] if self._loops else (_FIXED, False)
                match base:  # the index of a loop over all messages
                    case nodes.Getattr(node=nodes.Name(name="loop"), attr="index" | "index0"):
                        if whole and over.kinds == of.kinds == {"messages"}:
                            return _value("message", "fixed")
        raise UnprovenError("it picks items by a number that is not 0, 1, or next to a loop's")

    def _filter(self, node: nodes.Filter) -> _Value:
        if node.node is None or node.dyn_args or node.dyn_kwargs:
            raise UnprovenError(f"it uses the filter {node.name} on a block, or with unknown options")
        of = self._of(node.node)
        bare = not node.args and not node.kwargs
        match node.name:
            case "trim" | "string" if bare and of.kinds <= {"fixed", "role", "text", "content"}:
                return _TEXT if of.kinds & {"text", "content"} else _FIXED
            case "list" if bare and of.kinds <= {"fixed", "role", "parts", "messages"}:
                return of
            case "first" | "last" if bare and of.kinds <= {"fixed", "role", "parts", "messages"}:
                return _elements(of)
            case "length" | "count" if bare and of.kinds <= {"parts", "messages"}:
                return _value("count")
            case "selectattr" if of.kinds <= {"content", "parts", "messages"}:
                match node.args:
                    case [nodes.Const(value="role" | "type"), nodes.Const(value=test), other] if test in _COMPARING:
                        self._only_fixed("selectattr", other)
                        return _Value(frozenset("messages" if k == "messages" else "parts" for k in of.kinds))
            case "default" | "d" if not node.kwargs and 1 <= len(node.args) <= 2:
                if len(node.args) == 2:
                    self._condition(node.node)
                instead = self._of(node.args[0])
                return instead if of.constant is _MISSING else _union(of, instead)
        if node.name in _OF_FIXED and of.is_fixed:
            return self._only_fixed(node.name, *node.args, *(option.value for option in node.kwargs))
        raise UnprovenError(f"it uses the filter {node.name} on contents of a conversation")

    def _test(self, node: nodes.Test) -> _Value:
        of = self._of(node.node)
        if node.name in ("defined", "undefined"):
            if of.constant is _UNKNOWN:
                return _FIXED
            return _constant((of.constant is _MISSING) == (node.name == "undefined"))
        if node.name in _COMPARING and len(node.args or ()) == 1:
            return self._compare(node.node, _COMPARING[node.name], node.args[0])
        if node.name in ("odd", "even") and of.kinds <= {"count", "fixed"}:
            return _FIXED
        if node.name not in _TESTS or "state" in of.kinds:
            raise UnprovenError(f"it uses the test {node.name} on contents of a conversation")
        if node.name == "none" and of.constant is not _UNKNOWN:
            return _constant(of.constant is None)
        return _FIXED

    def _compare(self, left: nodes.Node, op: str, right: nodes.Node) -> _Value:
        a, b = self._of(left), self._of(right)
        if op in ("in", "notin") and b.kinds <= {"message", "part"} and isinstance(a.constant, str):
            # The parts of a string are its characters, which contain no name of two characters.
            if len(a.constant) < 2:
                raise UnprovenError("it searches a text")
            if len(b.kinds) > 1:
                return _FIXED
            (kind,) = b.kinds
            if a.constant not in _FIELDS[kind]:
                return _constant(op == "notin")
            return _FIXED
        if a.is_fixed and b.is_fixed:
            for one, other in ((a, b), (b, a)):
                unknown_role = isinstance(other.constant, str) and other.constant not in ROLES
                if one.kinds == {"role"} and unknown_role and op in ("eq", "ne"):
                    return _constant(op == "ne")
            return _FIXED
        for one, other in ((a, b), (b, a)):
            if one.kinds <= {"count", "fixed"} and type(other.constant) is int and op not in ("in", "notin"):
                if not 0 <= other.constant <= MOST:
                    raise UnprovenError(f"it compares a count or an index with {other.constant}")
                return _FIXED
        raise UnprovenError("it compares or searches texts, or numbers that have no limit")

    def _call(self, node: nodes.Call) -> _Value:
        if node.dyn_args or node.dyn_kwargs or node.kwargs:
            raise UnprovenError("it has a call with options by name")
        match node.node:
            case nodes.Name(name="raise_exception"):
                return _FIXED
            case nodes.Getattr(node=of, attr=str(method)):
                value = self._of(of)
                if method in _STRIPS and not node.args and value.kinds <= {"fixed", "role", "text", "content"}:
                    return _TEXT if value.kinds & {"text", "content"} else _FIXED
                if method == "get" and value.kinds <= {"message", "part"}:
                    match node.args:
                        case [nodes.Const(value=str(field)), *rest] if len(rest) <= 1:
                            others = [self._of(other) for other in rest]
                            return _union(self._field(of, field), *others) if others else self._field(of, field)
                if method in _OF_FIXED and value.is_fixed:
                    return self._only_fixed(method, *node.args)
                raise UnprovenError(f"it uses {method}() on contents of a conversation")
        raise UnprovenError("it calls something other than a method or raise_exception")

    def _join(self, values: Sequence[_Value]) -> _Value:
        kinds = _union(*values).kinds
        if kinds & {"count", "state"} and kinds <= {"fixed", "role", "count", "state", "text", "content"}:
            return _STATE
        if not kinds <= {"fixed", "role", "text", "content"}:
            raise UnprovenError("it joins messages or parts")
        return _TEXT if kinds & {"text", "content"} else _FIXED

    def _only_fixed(self, name: str, *children: nodes.Node) -> _Value:
        if not all(self._of(child).is_fixed for child in children):
            raise UnprovenError(f"it uses {name} with contents of a conversation")
        return _FIXED


def _elements(over: _Value) -> _Value:
    return _Value(frozenset(_ELEMENTS.get(kind, "fixed") for kind in over.kinds) or frozenset({"fixed"}))
