"""How an image becomes views, passes of the tower, and tokens: the layout that a bundle declares, with parameters.

A layout is a frozen dataclass of plain values in a file of its own in `layouts/`, named in `LAYOUTS`. Whoever needs
a number of tokens asks it with the image's size; nobody else knows how it comes about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import LayoutSpec
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.strict import Strict, plain
from vtx.runtime.vision.fit import fitted
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.runtime.vision.tokens import ImageTokens, Rows


class Layout(Protocol):
    """What is asked of a layout."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that any image gives."""
        ...

    @property
    def max_views(self) -> int:
        """The most passes of the tower that any image takes."""
        ...

    @property
    def newline(self) -> bool:
        """Whether a learned newline stands among the tokens."""
        ...

    def check(self, tower: TowerSpec) -> None:
        """Raise BundleError where the tower cannot give these tokens."""
        ...

    def limited(self, max_views: int) -> Layout:
        """The layout with at most so many views an image.

        Raises:
            RequestError: fewer than 1, or images have one view anyway.

        """
        ...

    def among(self, images: int) -> Layout:
        """The layout of each of so many images in one prompt."""
        ...

    def count(self, width: int, height: int) -> int:
        """Tokens of an image of this size in pixels, as it is before any preprocessing."""
        ...

    def views(self, image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
        """What the tower gets for an image, one view at a time: float32 [views, 3, height, width]."""
        ...

    def arrange(self, views: Sequence[ImageTokens], width: int, height: int, newline: Rows) -> ImageTokens:
        """The tokens of an image of this size from those of its views; `newline` [1, hidden], [0, hidden] if none."""
        ...


LAYOUTS: Mapping[str, type[Layout]] = {"single": Single, "anyres": Anyres, "tiles": Tiles}


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


def settings_for(layout: Layout, settings: ImageSettings, fit: str | None) -> ImageSettings:
    """`fit.fitted`, and a RequestError for a fit where images are seen in tiles, which show all of any shape."""
    if fit is not None and layout.max_views > 1:
        raise RequestError(
            f"fit {fit!r:.20} has no effect here: this model sees images of any shape in tiles; leave it out"
        )
    return fitted(settings, fit)


def spec_of(layout: Layout) -> LayoutSpec:
    """A layout as a bundle declares it."""
    name = next(name for name, kind in LAYOUTS.items() if type(layout) is kind)
    return LayoutSpec(name, layout.max_tokens, plain(layout))
