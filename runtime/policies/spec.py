"""Specs of reductions, `name:preset,key=value` joined by `+`, to objects and back."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Reduction, registered
from vtx.runtime.policies.options import OFF, Option, option_text, options_of

MAX_SPEC = 1000
MAX_NUMBER = 10**9
ENTRY_POINTS = "vtx.policies"


def kinds() -> dict[str, type[Reduction]]:
    """Every registered method by its name; imports the files of this package, then the ones of other packages.

    Raises RequestError: an installed package announces a policy that cannot be loaded.
    """
    import vtx.runtime.policies.methods as package
    from vtx.runtime.modules import modules_of

    for _ in modules_of(package):  # each registers its methods
        pass
    _load_entry_points()
    return dict(sorted(registered.items()))


@cache
def _load_entry_points() -> None:
    """Import the policies that installed packages announce under `vtx.policies`; each registers itself."""
    from importlib.metadata import entry_points  # a sixth of what `import vtx.runtime.api.load` takes

    for entry in entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist is not None else entry.value
        try:
            kind = entry.load()
        except Exception as e:
            raise RequestError(
                f"the policy {entry.name!r} of {package} cannot be loaded ({type(e).__name__}: {e}); "
                f"update or uninstall {package}"
            ) from e
        if registered.get(entry.name) is not kind:
            raise RequestError(
                f"{package} announces a policy {entry.name!r} and registers none by that name; "
                f'write @reduction("{entry.name}") above the class that its entry point names'
            )


def parse(text: str) -> tuple[Reduction, ...]:
    """The methods that a spec names, in the order in which they work; "none" names none.

    Raises RequestError: unknown names, options or values, or methods that do not go together.
    """
    if len(text) > MAX_SPEC:
        raise RequestError(f"the reduction spec has {len(text):,} characters, the limit is {MAX_SPEC:,}; shorten it")
    parts = () if text.strip() == "none" else tuple(map(_parse_part, text.split("+")))
    check_together(parts)
    return tuple(sorted(parts, key=lambda part: min(part.needs().cuts, default=0)))


def to_spec(parts: Sequence[Reduction]) -> str:
    """The canonical spec: every option spelled out. Parsing it gives the same methods again."""
    specs = []
    for part in parts:
        options = options_of(cast(Any, type(part)))  # mypy does not take a class for hashable
        values = ",".join(f"{option.name}={option_text(getattr(part, option.name))}" for option in options)
        specs.append(f"{part.name}:{values}" if values else part.name)
    return "+".join(specs) or "none"


def check_together(parts: Sequence[Reduction]) -> None:
    """Raise RequestError if methods do not go together."""
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"{name} is named twice in --reduce {'+'.join(names)}; name it once")
    setting: dict[str, str] = {}  # which method gives an extra input of the vision graph
    for part in parts:
        for name in entry.vision_inputs() if (entry := part.entry()) else ():
            if name in setting:
                pair = f"{setting[name]} and {part.name}"
                raise RequestError(f"{pair} both set {name}; leave one out, or give {name}={OFF}")
            setting[name] = part.name
    _check_patches(parts)
    for before, after in pairwise(parts):
        if before.needs().cuts and not after.needs().cuts:
            raise RequestError(
                f"{after.name} works before the decoder and {before.name} within it; write {after.name} first"
            )


def _check_patches(parts: Sequence[Reduction]) -> None:
    """Raise RequestError for methods that work on whole frames or on all patches, but not first or not alone."""
    for number, part in enumerate(parts):
        for other in parts[:number] if part.of_videos else ():
            if other.entry() is not None:
                raise RequestError(f"{part.name} chooses from whole frames of videos; write it before {other.name}")
        needs = part.needs()
        for place, other in enumerate(parts if needs.projector or needs.tower_layers else ()):
            if other.needs().merging or (needs.projector and other.needs().of_patches):
                raise RequestError(f"{other.name} and {part.name} both work on the tower's patches; leave one out")
            if place < number and other.entry() is not None:
                raise RequestError(f"{part.name} works on all of the tower's patches; write it before {other.name}")


def _parse_part(text: str) -> Reduction:
    name, _, rest = (part.strip() for part in text.partition(":"))
    reductions = kinds()
    if name not in reductions:
        raise RequestError(f"no reduction is called {name[:40]!r}; there are {', '.join(reductions)}, and none")
    kind = reductions[name]
    preset: Mapping[str, Any] = {}
    options: dict[str, Any] = {}
    fields = {option.name: option for option in options_of(cast(Any, kind))}
    for number, item in enumerate(rest.split(",") if rest else ()):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and not number:
            preset = _preset(kind, key)
            continue
        if key not in fields or not equals:
            raise RequestError(f"{name} has no option {key[:40]!r}; it has {', '.join(fields) or 'none'}")
        if key in options:
            raise RequestError(f"{name}: {key} is given twice; give it once")
        options[key] = _option_value(fields[key], value, f"{name}: {key}")
    return kind(**{**preset, **options})


def _option_value(option: Option, text: str, where: str) -> Any:
    """`text` as the value of an option; None if it is one that can be turned off, and is."""
    if not option.optional:
        return _value(option.type, text, where)
    return None if text == OFF else _value(option.type, text, f"{where} ({OFF} turns it off)")


def _preset(kind: type[Reduction], name: str) -> Mapping[str, Any]:
    """The options of a preset. Raises RequestError."""
    if name not in kind.presets:
        there = f"it has {', '.join(kind.presets)}" if kind.presets else "it has none; write key=value"
        raise RequestError(f"{kind.name} has no preset {name[:40]!r}; {there}")
    return kind.presets[name]


def _value(hint: Any, text: str, where: str) -> Any:
    """`text` as the type that an option has."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is typing.Literal:
        if text not in args:
            raise RequestError(f"{where} is {text[:40]!r}; it is one of {', '.join(args)}")
        return text
    if origin is tuple:
        return tuple(_value(args[0], part, where) for part in text.split("/"))
    try:
        value = hint(text)
        finite = math.isfinite(value)
    except (ValueError, OverflowError) as e:
        raise RequestError(f"{where} is {text[:40]!r}; give {_NUMBERS[hint]}") from e
    if not finite or (hint is int and abs(value) > MAX_NUMBER):
        raise RequestError(f"{where} is {text[:40]!r}; give {_NUMBERS[hint]}")
    return value or hint(0)  # never -0.0


_NUMBERS = {int: f"a whole number up to {MAX_NUMBER:,}", float: "a number"}
