"""Image layouts, one file each, and their declarations in bundles: read, checked against the tower, and written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

from vtx.runtime.bundle.spec.manifest import PAIRS, LayoutSpec
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import UPGRADE, Strict, json_value
from vtx.runtime.vision.layout import Layout, VideoLayout, registered

T = TypeVar("T", bound=Layout | VideoLayout)
FRAMES = "frames"  # layouts of videos beside PAIRS
SLICED = "sliced_frames"


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


def read_frames(spec: LayoutSpec) -> VideoLayout:
    """The layout of videos that a bundle declares. Raises BundleError as `read_layout` does."""
    return _read(spec, video_layouts(), "layout of videos")


def video_layouts() -> Mapping[str, type[VideoLayout]]:
    """The layouts of videos by their names."""
    from vtx.runtime.vision.layouts.frames import Frames
    from vtx.runtime.vision.layouts.pairs import Pairs
    from vtx.runtime.vision.layouts.sliced_frames import SlicedFrames

    return {FRAMES: Frames, PAIRS: Pairs, SLICED: SlicedFrames}


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


def spec_of(layout: Layout | VideoLayout) -> LayoutSpec:
    """A layout as a bundle declares it."""
    kinds: Mapping[str, type[Layout | VideoLayout]] = {**layouts(), **video_layouts()}
    name = next(name for name, kind in kinds.items() if type(layout) is kind)
    least = layout.min_tokens if isinstance(layout, Layout) else None
    return LayoutSpec(name, layout.max_tokens, json_value(layout), least)
