"""Image layouts, one file each, and their declarations in bundles: read, checked against the tower, and written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from vtx.runtime.bundle.spec.manifest import LayoutSpec
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import UPGRADE, Strict, json_value
from vtx.runtime.vision.layout import Layout, registered

if TYPE_CHECKING:
    from vtx.runtime.vision.layouts.frames import Frames
    from vtx.runtime.vision.layouts.pairs import Pairs

T = TypeVar("T", bound="Layout | Frames | Pairs")
FRAMES, PAIRS = "frames", "pairs"  # the layouts of videos


def layouts() -> Mapping[str, type[Layout]]:
    """Every registered layout by its name; imports the files of `layouts/`."""
    from vtx.runtime.modules import modules_of

    for _ in modules_of(sys.modules[__name__]):
        pass
    return dict(sorted(registered.items()))


def read_layout(spec: LayoutSpec, tower: TowerSpec) -> Layout:
    """The layout that a bundle declares, checked against its tower.

    Raises BundleError for an unknown layout, wrong parameters, or a maximum that does not follow from them.
    """
    if spec.name.isidentifier() and find_spec(f"{__name__}.{spec.name}"):
        import_module(f"{__name__}.{spec.name}")  # the other files need not be read
    layout = _read(spec, registered if spec.name in registered else layouts(), "image layout")
    if spec.min_tokens != layout.min_tokens:
        raise BundleError(f"vtx.json: layout.min_tokens {spec.min_tokens} is not that of {spec.name!r}; export again")
    layout.check(tower)
    return layout


def read_frames(spec: LayoutSpec) -> Frames | Pairs:
    """The layout of videos that a bundle declares. Raises BundleError as `read_layout` does."""
    from vtx.runtime.vision.layouts.frames import Frames
    from vtx.runtime.vision.layouts.pairs import Pairs

    known: dict[str, type[Frames | Pairs]] = {FRAMES: Frames, PAIRS: Pairs}
    return _read(spec, known, "layout of videos")


def _read(spec: LayoutSpec, known: Mapping[str, type[T]], noun: str) -> T:
    kind = known.get(spec.name)
    if kind is None:
        raise BundleError(
            f"vtx.json: the {noun} {spec.name!r} is unknown to this vtx, which has {', '.join(known)}; {UPGRADE}"
        )
    layout = Strict().read(kind, spec.parameters, f"vtx.json: layout {spec.name!r}")
    if layout.max_tokens != spec.max_tokens:
        raise BundleError(
            f"vtx.json: layout {spec.name!r} gives at most {layout.max_tokens} tokens, layout.max_tokens is "
            f"{spec.max_tokens}; export again"
        )
    return layout


def spec_of(layout: Layout | Frames | Pairs) -> LayoutSpec:
    """A layout as a bundle declares it."""
    from vtx.runtime.vision.layouts.frames import Frames
    from vtx.runtime.vision.layouts.pairs import Pairs

    if isinstance(layout, Frames | Pairs):
        return LayoutSpec(PAIRS if isinstance(layout, Pairs) else FRAMES, layout.max_tokens, json_value(layout))
    name = next(name for name, kind in layouts().items() if type(layout) is kind)
    return LayoutSpec(name, layout.max_tokens, json_value(layout), layout.min_tokens)
