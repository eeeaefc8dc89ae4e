"""The grammar of `--k`: a number, `none` or `auto`, or a list of them for commands with several."""

from __future__ import annotations

from typing import Any

import click

Depth = int | str | None  # K, "auto" for the gates, None for no withdrawal


class DepthType(click.ParamType):  # type: ignore[type-arg]
    """`17`, `none`, `auto`, and `default` for the bundle's.

    With `several` also `none,17,9`, as a tuple; that option is `multiple`, with the callback `joined`.
    """

    name = "depth"

    def __init__(self, *, several: bool = False, auto: bool = True, default: bool = False) -> None:
        self._several = several
        self._names: dict[str, str | None] = {"none": None}
        self._names |= {name: name for name, allowed in (("auto", auto), ("default", default)) if allowed}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")] if self._several else [value.strip()]
        try:
            depths: list[Depth] = [self._names[part] if part in self._names else int(part) for part in parts]
        except ValueError:
            forms = ["a number", *self._names, *(["a list like none,17,9"] if self._several else [])]
            self.fail(f"{value!r} is not {', '.join(forms[:-1])} or {forms[-1]}", param, ctx)
        return tuple(depths) if self._several else depths[0]


def joined(_: click.Context, __: click.Parameter, given: tuple[tuple[Depth, ...], ...]) -> tuple[Depth, ...]:
    """The lists of an option that was given more than once, as one."""
    return tuple(depth for depths in given for depth in depths)
