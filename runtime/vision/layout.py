"""How many tokens an image gives: the layout that a bundle declares, by name and with parameters.

A layout is a frozen dataclass of whole numbers in a file of its own in `layouts/`, named in `LAYOUTS`. Whoever needs
a number of tokens asks it with the image's size; nobody else knows how it comes about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vtx.runtime.bundle.spec.manifest import LayoutSpec
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.bundle.strict import Strict, plain
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layouts.single import Single


class Layout(Protocol):
    """What is asked of a layout."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that any image gives."""
        ...

    def check(self, tower: TowerSpec) -> None:
        """Raise BundleError where the tower cannot give these tokens."""
        ...

    def count(self, width: int, height: int) -> int:
        """Tokens of an image of this size in pixels, as it is before any preprocessing."""
        ...


LAYOUTS: Mapping[str, type[Layout]] = {"single": Single}


def read_layout(spec: LayoutSpec, tower: TowerSpec) -> Layout:
    """The layout that a bundle declares, checked against its tower.

    Raises:
        BundleError: no such layout, other parameters than it has, or another maximum than follows from them.

    """
    kind = LAYOUTS.get(spec.name)
    if kind is None:
        raise BundleError(
            f"vtx.json: the image layout {spec.name!r} is unknown to this vtx, which has {', '.join(LAYOUTS)}; "
            'upgrade it with pip install -U "vtx-edge"'
        )
    layout = Strict().read(kind, spec.parameters, f"vtx.json: layout {spec.name!r}")
    if layout.max_tokens != spec.max_tokens:
        raise BundleError(
            f"vtx.json: layout {spec.name!r} gives at most {layout.max_tokens} tokens, layout.max_tokens is "
            f"{spec.max_tokens}; export again"
        )
    layout.check(tower)
    return layout


def spec_of(layout: Layout) -> LayoutSpec:
    """A layout as a bundle declares it."""
    name = next(name for name, kind in LAYOUTS.items() if type(layout) is kind)
    return LayoutSpec(name, layout.max_tokens, plain(layout))
