"""Write runtime/cpp/src/policies/methods.inc: the register of methods, from the dataclasses that declare them.

`tests/runtime/cpp/test_names.py` fails where the file differs from what this makes.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vtx.runtime.policies import methods
from vtx.runtime.policies.base import Reduction
from vtx.runtime.policies.options import Not, Option, option_text, options_of
from vtx.runtime.policies.spec import kinds

FILE = Path(__file__).parents[1] / "runtime/cpp/src/policies/methods.inc"
HEAD = """\
// The register of methods that the Python runtime declares. Written by scripts/cpp_methods.py; do not edit.
// Methods: name, options, presets, needs, conflicts. Options: name, type, optional, default, choices, limits (least,
// most, above, or_count, fix).
"""
TYPES = {int: "whole", float: "number"}


def register() -> str:
    """The text of methods.inc."""
    own = [kind for kind in kinds().values() if kind.__module__.startswith(f"{methods.__name__}.")]
    return HEAD + "".join(f"{_method(kind)},\n" for kind in own)


def _method(kind: type[Reduction]) -> str:
    presets = (
        _list((_text(name), _text(",".join(f"{key}={option_text(value)}" for key, value in preset.items()))))
        for name, preset in kind.presets.items()
    )
    needs = (
        _list((_text(need), _text(source), "{}") if isinstance(source, str) else (_text(need), '""', _values(source)))
        for need, source in kind.requires.items()
    )
    conflicts = (_list((_values(values), _text(message))) for values, message in kind.conflicts)
    options = ",\n  ".join(map(_option, options_of(kind)))
    parts = (f"{{{options}}}", *map(_list, (presets, needs, conflicts)))
    return f"{{{_text(kind.name)}" + "".join(f",\n {part}" for part in parts) + "}"


def _option(option: Option) -> str:
    choices = typing.get_args(option.type) if typing.get_origin(option.type) is typing.Literal else ()
    layers = typing.get_origin(option.type) is tuple
    kind = "choice" if choices else "layers" if layers else TYPES[option.type]
    limits = option.limits
    values = ("-kInfinity", "kInfinity", "false", "false", '""')
    if limits is not None:
        values = (
            _number(limits.least),
            _number(limits.most),
            _bool(limits.above),
            _bool(limits.or_count),
            _text(limits.fix),
        )
    default = _text(option_text(option.default))
    parts = (_text(option.name), f"OptionType::{kind}", _bool(option.optional), default, _list(map(_text, choices)))
    return _list((*parts, _list(values)))


def _values(values: dict[str, Any]) -> str:
    """Conditions: an option, its value as a spec has it, and whether it must be or must not be that."""
    pairs = (
        (key, value.value, False) if isinstance(value, Not) else (key, value, True) for key, value in values.items()
    )
    return _list(_list((_text(key), _text(option_text(value)), _bool(equal))) for key, value, equal in pairs)


def _list(parts: Iterable[str]) -> str:
    return f"{{{', '.join(parts)}}}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _number(value: float) -> str:
    return {"inf": "kInfinity", "-inf": "-kInfinity"}.get(text := repr(float(value)), text)


def _text(value: str) -> str:
    assert value.isascii()
    return json.dumps(value)


if __name__ == "__main__":
    FILE.write_text(register(), encoding="utf-8")
