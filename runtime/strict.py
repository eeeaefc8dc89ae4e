"""JSON read strictly into frozen dataclasses: an unknown, missing or mistyped key is an error that names it."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from vtx.runtime.errors import BundleError, VtxError

T = TypeVar("T")
_OPTIONAL = "optional"
UNIONS = (types.UnionType, typing.Union)  # the latter of a Literal and others
DAMAGED = "the bundle was altered or made by another vtx, export again"
UPGRADE = "install a newer vtx"


@dataclass(frozen=True, slots=True)
class Strict:
    """A strict reader; it raises `error`, whose message ends with `cure`, the fix."""

    error: type[VtxError] = BundleError
    cure: str = DAMAGED

    def read(self, kind: type[T], data: Any, where: str) -> T:
        """`data`, as JSON gives it, as the dataclass `kind`.

        Every field that is not `optional` must be there, and no other key. A tuple is a list in JSON, a float may be
        a whole number.

        Raises VtxError: of the class `error`, naming the key by its path from `where`.
        """
        if not isinstance(data, dict):
            raise self.error(f"{where} is not an object; {self.cure}")
        hints = _hints(kind)
        for name in sorted(data.keys() - hints):
            self.unknown(where, name)
        missing = sorted(hints.keys() - data.keys() - _optional(kind).keys())
        if missing:
            raise self.missing(where, missing[0])
        return kind(**{name: self.value(hints[name], data[name], f"{where}: {name}") for name in hints if name in data})

    def unknown(self, where: str, name: str) -> None:
        """Raise the error of an unknown key; a reader that returns ignores it."""
        raise self.error(f"{where}: unknown key {name!r}; {self.cure}")

    def missing(self, where: str, name: str) -> VtxError:
        """The error of a missing key."""
        return self.error(f"{where}: key {name!r} is missing; {self.cure}")

    def mismatch(self, where: str, data: Any, kinds: Sequence[Any]) -> VtxError:
        """The error of a value that has none of these types."""
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        return self.error(f"{where} is {str(data)[:60]!r}, not {names}; {self.cure}")

    def value(self, hint: Any, data: Any, where: str) -> Any:
        """`data` as a value of the annotated type `hint`."""
        if type(data) is hint or hint is Any:
            return data
        origin, args = _parts(hint)
        if origin in UNIONS:
            return self._one_of(args, data, where)
        if origin is tuple and isinstance(data, list):
            return self._tuple(args, data, where)
        if origin in (dict, Mapping) and isinstance(data, dict):
            return {key: self.value(args[1], item, f"{where}.{key}") for key, item in data.items()}
        if origin is typing.Literal and _has_form(hint, data):
            return data
        if dataclasses.is_dataclass(hint):
            return self.read(cast(type, hint), data, where)
        if hint is float and type(data) is int:
            try:
                return float(data)
            except OverflowError:  # a whole number of hundreds of digits
                return float("inf")
        raise self.mismatch(where, data, (hint,))

    def _one_of(self, kinds: Sequence[Any], data: Any, where: str) -> Any:
        """`data` as the first of the types whose form it has."""
        if data is None and type(None) in kinds:
            return None
        for kind in kinds:
            if kind is not type(None) and _has_form(kind, data):
                return self.value(kind, data, where)
        raise self.mismatch(where, data, kinds)

    def _tuple(self, kinds: Sequence[Any], data: Sequence[Any], where: str) -> tuple[Any, ...]:
        if kinds[-1] is Ellipsis:
            return tuple(self.value(kinds[0], item, where) for item in data)
        if len(kinds) != len(data):
            raise self.error(f"{where} has {len(data)} items, not {len(kinds)}; {self.cure}")
        return tuple(self.value(kind, item, where) for kind, item in zip(kinds, data, strict=True))


def json_value(value: Any) -> Any:
    """A dataclass as JSON's objects, lists and scalars, without the optional fields that have their default."""
    if dataclasses.is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        unused = {name for name, default in _optional(type(value)).items() if values[name] == default}
        return {name: json_value(item) for name, item in values.items() if name not in unused}
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    return [json_value(item) for item in value] if isinstance(value, tuple | list) else value


def optional(default: Any) -> Any:
    """Declare a field that may be absent from a file, and is not written when it has its default.

    Fields that were added to a format later are optional: a reader that does not know them reads all files that do not
    use them, and refuses the others.
    """
    return dataclasses.field(default=default, metadata={_OPTIONAL: True})


# The types of a dataclass's fields, without the mark of those that are given by name alone.
_hints: Callable[[Any], dict[str, Any]] = cache(
    lambda kind: {name: hint for name, hint in typing.get_type_hints(kind).items() if hint is not dataclasses.KW_ONLY}
)


# The optional fields of a dataclass with their defaults.
_optional: Callable[[Any], dict[str, Any]] = cache(
    lambda kind: {field.name: field.default for field in dataclasses.fields(kind) if _OPTIONAL in field.metadata}
)


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The origin and the arguments of an annotated type."""
    return typing.get_origin(hint), typing.get_args(hint)


def write_json(value: Any) -> str:
    """A dataclass as the text of a JSON file, one value a line."""
    return json.dumps(json_value(value), indent=1, ensure_ascii=False) + "\n"


def _has_form(kind: Any, data: Any) -> bool:
    """Return True if JSON's `data` has the outer form of `kind`: of a dataclass also its `type`, if it is a Literal."""
    if typing.get_origin(kind) is typing.Literal:
        return any(type(data) is type(value) and data == value for value in typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        tag = _hints(kind).get("type")
        tagged = typing.get_origin(tag) is typing.Literal
        return isinstance(data, dict) and (not tagged or _has_form(tag, data.get("type", _optional(kind).get("type"))))
    if typing.get_origin(kind) in (dict, Mapping):
        return isinstance(data, dict)
    if typing.get_origin(kind) is tuple:
        return isinstance(data, list)
    return type(data) is kind or (kind is float and type(data) is int)
