"""The options of a method as data, for both runtimes: libvtx gets them from `scripts/cpp_methods.py`."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from vtx.runtime.vision.tokens import share

OFF = "off"


@dataclass(frozen=True, slots=True)
class OptionLimits:
    """The values that an option may have: from `least` to `most`, with `above` without `least` itself.

    `fix` ends the message that refuses any other. `or_count`: also every whole number of at least 2. The layers of an
    option that names several must rise.
    """

    fix: str
    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    or_count: bool = False

    def allow(self, value: Any) -> bool:
        if isinstance(value, tuple):
            return bool(value) and all(map(self.allow, value)) and all(a < b for a, b in pairwise(value))
        if self.or_count and value >= 2 and float(value).is_integer():
            return True
        return bool(self.least < value if self.above else self.least <= value) and value <= self.most


@dataclass(frozen=True, slots=True, eq=False)
class Not:
    """Equal to every value but this."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return bool(self.value != other)

    def __hash__(self) -> int:
        return hash(self.value)


def option(
    default: Any,
    fix: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: bool = False,
    or_count: bool = False,
) -> Any:
    """An option of a method, a field of its dataclass; `fix` and the rest as in `OptionLimits`."""
    return dataclasses.field(default=default, metadata={"limits": OptionLimits(fix, least, most, above, or_count)})


def share_or_number(default: float) -> Any:
    """The option `keep`: a share of the tokens, or a number of them."""
    fix = "give the share to keep, above 0 and up to 1, or a whole number of at least 2"
    return option(default, fix, least=0, most=1, above=True, or_count=True)


def number_to_keep(keep: float, count: int) -> int:
    """The number of `count` tokens that the option `keep` means: shares are rounded up."""
    return share(keep, count) if keep <= 1 else int(keep)


def cosine(default: float) -> Any:
    return option(default, "give a cosine from -1 to 1", least=-1, most=1)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a method: the `type` of its value, whether it may be off, its default and its limits."""

    name: str
    type: Any
    optional: bool
    default: Any
    limits: OptionLimits | None


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a method in their order: the fields of its dataclass."""
    hints = typing.get_type_hints(kind)
    options = list[Option]()
    for field in dataclasses.fields(typing.cast(Any, kind)):
        hint = hints[field.name]
        optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
        value_type = typing.get_args(hint)[0] if optional else hint
        options.append(Option(field.name, value_type, optional, field.default, field.metadata.get("limits")))
    return tuple(options)


def option_text(value: Any, *, exact: bool = False) -> str:
    """A value as a spec writes it; `exact`: as Python does, 1.0 and not 1."""
    if value is None:
        return OFF
    if isinstance(value, tuple):
        return "/".join(map(option_text, value))
    # Without the plus of an exponent, which would join two words.
    return repr(value).removesuffix(".0").replace("e+", "e") if isinstance(value, float) and not exact else str(value)
