"""How an image becomes views, passes of the tower, and tokens: the layout that a bundle declares, with parameters.

A layout is a frozen dataclass of plain values in a file of its own in `layouts/`, which registers it under a name.
Whoever needs a number of tokens asks it with the image's size; nobody else knows how it comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import RequestError
from vtx.runtime.vision.fit import fitted
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, MarkedImage


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

    def passes(self, width: int, height: int) -> int:
        """Passes of the tower that an image of this size takes: the number of its `views`."""
        ...

    def views(self, image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
        """What the tower gets for an image, one view at a time: float32 [views, 3, height, width]."""
        ...

    def arrange(self, views: Sequence[ImageTokens], width: int, height: int, newline: HiddenStates) -> ImageTokens:
        """The tokens of an image of this size from those of its views; `newline` [1, hidden], [0, hidden] if none."""
        ...


@runtime_checkable
class Resolving(Layout, Protocol):
    """A layout of images at their own resolution, which may be limited."""

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest image."""
        ...

    def within(self, max_pixels: int) -> Layout:
        """The layout with images of at most so many pixels. Raises RequestError where no token has so few."""
        ...

    def fitting(self, sizes: Sequence[tuple[int, int]], tokens: int) -> int | None:
        """The most pixels with which images of these sizes (width, height) have so many tokens; None: none do."""
        ...


@runtime_checkable
class MarkedLayout(Protocol):
    """A layout that puts text among the tokens of an image."""

    def marked(self, width: int, height: int) -> MarkedImage:
        """What stands in a prompt for an image of this size."""
        ...


def placed(layout: Layout, width: int, height: int) -> int | MarkedImage:
    """What stands in a prompt for an image of this size: so many image tokens, or these with text among them."""
    return layout.marked(width, height) if isinstance(layout, MarkedLayout) else layout.count(width, height)


L = TypeVar("L", bound=Layout)
registered: dict[str, type[Layout]] = {}


def image_layout(name: str) -> Callable[[type[L]], type[L]]:
    """Register a layout, a frozen dataclass, under the name that manifests give it; its fields are its parameters."""

    def register(kind: type[L]) -> type[L]:
        assert name not in registered, f"two image layouts are called {name}; rename one in its @image_layout(...)"
        registered[name] = kind
        return kind

    return register


def limited_layout(layout: Layout, max_tiles: int | None, max_pixels: int | None) -> Layout:
    """The layout with at most so many tiles or pixels of an image; None: no such limit.

    Raises:
        RequestError: a limit that this layout does not have, or one too low.

    """
    layout = layout if max_tiles is None else layout.limited(max_tiles)
    if max_pixels is None:
        return layout
    if not isinstance(layout, Resolving):
        raise RequestError(
            "max_pixels has no effect here: this model does not see images at their own resolution; leave it out"
        )
    return layout.within(max_pixels)


def settings_for(layout: Layout, settings: ImageSettings, fit: str | None) -> ImageSettings:
    """`fit.fitted`, and a RequestError for a fit where images are seen in tiles or at their own resolution."""
    if fit is not None and (layout.max_views > 1 or settings.own_size):
        seen = "at their own resolution" if settings.own_size else "in tiles"
        raise RequestError(
            f"fit {fit!r:.20} has no effect here: this model sees images of any shape {seen}; leave it out"
        )
    return fitted(settings, fit)
