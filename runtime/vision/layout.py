"""Layouts: how an image or a video becomes views (passes of the tower) and tokens. A bundle declares one of each.

A layout is a frozen dataclass of plain values in a file of its own in `layouts/`. One of images registers itself under
a name. All counts of an image's or video's tokens come from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.checks import check_whole
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames
from vtx.runtime.vision.plan import ImagePlan, Views
from vtx.runtime.vision.preprocess import fitted
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage

Detail = Literal["auto", "low", "high"]  # of an image, as OpenAI's API names them
ImageDetail: TypeAlias = "int | Detail | None"  # the most tokens of an image; None: as the bundle says
DETAILS: tuple[str, ...] = get_args(Detail)


class Layout(ABC):
    """A layout of images: `plan` and its limits. Here are the limits of one with one view an image, of a fixed size."""

    __slots__ = ()
    newline = False  # a learned newline is among the tokens

    @abstractmethod
    def plan(self, width: int, height: int) -> ImagePlan:
        """The views, tokens and text of an image of this size in pixels, before any preprocessing."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens that any image gives."""

    @property
    def min_tokens(self) -> int | None:
        """Tokens of the smallest image, if images are seen at native resolution; else None."""
        return None

    @property
    def max_views(self) -> int:
        """The most passes of the tower that any image takes."""
        return 1

    @property
    def pixels(self) -> int | None:
        """The `max_pixels` at which `within` gives this layout, if images are not larger here; else None."""
        return None

    @abstractmethod
    def check(self, tower: TowerSpec) -> None:
        """Raise BundleError if the tower cannot give these tokens."""

    def limited(self, max_views: int) -> Layout:
        """The layout with at most `max_views` views an image. Raises RequestError if images have one view anyway."""
        fix = "leave it out" if self.min_tokens is None else "use max_pixels (--max-pixels)"
        raise RequestError(f"max_tiles has no effect here: this model sees each image in one piece; {fix}")

    def within(self, max_pixels: int) -> Layout:
        """The layout with images of at most `max_pixels` pixels after they are resized.

        Raises RequestError if not even one token has so few, or images are not seen at native resolution.
        """
        raise RequestError(
            "max_pixels has no effect here: this model does not see images at native resolution; leave it out"
        )

    @property
    def budgets(self) -> Sequence[int]:
        """The numbers of tokens that images can be asked to have at most, the largest first; empty: any number."""
        return ()

    def choices(self, tokens: int | None) -> Iterator[Layout]:
        """The layouts in which an image may have at most `tokens` tokens, the largest first; None: any number."""
        for views in range(self.max_views, 1, -1):
            yield self.limited(views)
        yield self if self.max_views == 1 else self.limited(1)

    def low(self) -> Layout:
        """The layout of OpenAI's detail "low"."""
        return self if self.max_views == 1 else self.limited(1)

    def high(self) -> Layout:
        """The layout of OpenAI's detail "high": images as large as the bundle allows."""
        return self

    def released(self) -> Layout:
        """The layout in which the released code of CDPruner sees LLaVA-NeXT's images: fit "released"."""
        raise RequestError(
            "fit 'released' is for LLaVA-NeXT (tiles of CDPruner's code) and pi0 (pictures of openpi); leave it out"
        )

    def for_images(self, count: int) -> Layout:
        """The layout of each of `count` images in one prompt."""
        return self

    @property
    def has_text(self) -> bool:
        """True if the prompt has text among the tokens of an image."""
        return bool(self.plan(1, 1).texts)

    def fitting(self, sizes: Sequence[tuple[int, int]], tokens: int) -> int | None:
        """The largest `max_pixels` at which images of these sizes (width, height) have at most `tokens` in total.

        Text that ends their rows counts.
        """
        if self.pixels is None:
            return None
        for layout in self.choices(None):
            plans = [layout.plan(*size) for size in sizes]
            if sum(plan.tokens + len(plan.spans) for plan in plans) <= tokens:
                return layout.pixels
        return None

    def count(self, width: int, height: int) -> int:
        """Tokens of an image of this size."""
        return self.plan(width, height).tokens

    def passes(self, width: int, height: int) -> int:
        """Passes of the tower that an image of this size takes: the number of its `views`."""
        return len(self.plan(width, height).views)

    def prompt_image(self, width: int, height: int) -> PromptImage:
        """An image of this size in a prompt: its tokens, and the text among them."""
        return self.plan(width, height).prompt

    def views(self, image: Image.Image, settings: ImageSettings) -> Views:
        """The tower's inputs for an image, one view at a time: float32 [views, 3, height, width], or a list of them."""
        return self.plan(*image.size).pixels(image, settings)

    def arrange(self, views: Sequence[ImageTokens], width: int, height: int, newline: HiddenStates) -> ImageTokens:
        """The tokens of an image of this size from those of its views; `newline` [1, hidden], [0, hidden] if none."""
        return self.plan(width, height).arrange(views, newline)


@dataclass(frozen=True, slots=True)
class TiledLayout(Layout):
    """Views of `tile` pixels a side and `tokens` each."""

    tile: int
    tokens: int

    @property
    def max_tokens(self) -> int:
        return self.tokens * self.max_views

    def check(self, tower: TowerSpec) -> None:
        check_tiles(tower, self.tile, self.tokens)


@dataclass(frozen=True, slots=True)
class SquareLayout(Layout):
    """Views of any shape. A token is a square of `merge` x `merge` patches of `patch` pixels a side."""

    positions = "rotary"  # of the towers that give such tokens
    patch: int
    merge: int

    @property
    def unit(self) -> int:
        """Pixels a side of one token's square."""
        return self.patch * self.merge

    def check(self, tower: TowerSpec) -> None:
        check_squares(tower, self.patch, self.merge, self.positions)


class VideoLayout(ABC):
    """A layout of videos. The defaults are those of one in which a frame has one view, of a fixed size."""

    __slots__ = ()

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens of a video of the usual number of frames."""

    @property
    @abstractmethod
    def sampling(self) -> FrameSampling:
        """The frames that are seen."""

    @property
    def max_views(self) -> int:
        """The most views of a frame, or of several that are `together`."""
        return 1

    @property
    def together(self) -> int | None:
        """Frames of a view, if it is not one alone."""
        return None

    def limited(self, max_views: int) -> VideoLayout:
        """The layout with at most `max_views` views a frame, the whole frame included, if frames have several."""
        return self

    def within(self, max_pixels: int) -> VideoLayout:
        """The layout with at most `max_pixels` of each frame, which images have checked, unless all have one size."""
        return self

    def sampled(self, clip: SampledFrames, frames: int) -> SampledFrames:
        """The clip with `frames` frames instead."""
        return replace(clip, numbers=tuple(self.sampling.numbers(clip.count, clip.rate, frames)))

    @abstractmethod
    def prompt_image(self, clip: SampledFrames, width: int, height: int) -> PromptImage:
        """A video of frames of this size in a prompt: its tokens, and the text among them."""

    @abstractmethod
    def frame(self, frames: int, width: int, height: int) -> ImagePlan:
        """The plan of each of `frames` frames of this size."""

    def views(self, frame: Image.Image, settings: ImageSettings, frames: int) -> list[NDArray[np.float32]]:
        """One of `frames` frames as the tower's inputs, [3, height, width] float32 each."""
        return [*self.frame(frames, *frame.size).pixels(frame, settings)]

    @abstractmethod
    def arrange(
        self,
        views: Sequence[ImageTokens],
        clip: SampledFrames,
        width: int,
        height: int,
        newline: HiddenStates,
        first: int = 0,
    ) -> ImageTokens:
        """The tokens of a video from those of its views, from number `first` on.

        `newline` [1, hidden], [0, hidden] if none.
        """


def check_tiles(tower: TowerSpec, tile: int, tokens: int) -> None:
    """Raise BundleError if the tower does not turn `tile` pixels a side into `tokens` tokens."""
    if (tile, tokens) != (tower.image, tower.tokens):
        raise BundleError(
            f"vtx.json: the image layout has tiles of {tile} pixels and {tokens} tokens, the tower takes "
            f"{tower.image} pixels and gives {tower.tokens} tokens; export the bundle again"
        )


def check_squares(tower: TowerSpec, patch: int, side: int, positions: str) -> None:
    """Raise BundleError if the tower's tokens are not of `side` x `side` patches of `patch` pixels a side.

    Or if it has other `positions`.
    """
    if (patch, side, positions) != (tower.patch, tower.square, tower.positions):
        raise BundleError(
            f"vtx.json: the image layout has tokens of {side} x {side} patches of {patch} pixels, "
            f"the tower of {tower.square} x {tower.square} of {tower.patch}; export the bundle again"
        )


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
    """The layout with at most `max_tiles` tiles or `max_pixels` pixels an image; None: no such limit.

    Raises RequestError for a limit that this layout does not have, or one too low.
    """
    for name, value in (("max_tiles", max_tiles), ("max_pixels", max_pixels)):
        if value is not None:
            check_whole(name, value, 1)
    layout = layout if max_tiles is None else layout.limited(max_tiles)
    return layout if max_pixels is None else layout.within(max_pixels)


def sized_layout(layout: Layout, image_tokens: ImageDetail, width: int, height: int) -> Layout:
    """The layout with at most `image_tokens` tokens of an image of this size, or that of one of OpenAI's details.

    Raises RequestError for fewer or more tokens than this image can have.
    """
    if image_tokens is None or image_tokens == "auto":
        return layout
    if isinstance(image_tokens, str):
        return layout.low() if image_tokens == "low" else layout.high()
    most = layout.max_tokens
    if image_tokens > most:
        raise RequestError(f"image_tokens is {image_tokens}; images of this bundle have at most {most}; lower it")
    fewest = most
    for choice in layout.choices(image_tokens):
        fewest = choice.count(width, height)
        if fewest <= image_tokens:
            return choice
    raise RequestError(
        f"image_tokens is {image_tokens}; an image of {width}x{height} pixels has at least {fewest} here; raise it"
    )


def check_image_tokens(layout: Layout, image_tokens: ImageDetail) -> None:
    """Raise RequestError for a value of another form, or a number if all images of this bundle have the same."""
    if image_tokens is None or image_tokens in DETAILS:
        return
    if isinstance(image_tokens, str):
        raise RequestError(f"the detail of an image is {image_tokens!r:.40}; it must be {', '.join(DETAILS)}")
    check_whole("image_tokens", image_tokens, 1)
    if layout.max_views == 1 and layout.min_tokens is None:
        raise RequestError(
            f"image_tokens has no effect here: every image of this model has {layout.max_tokens} tokens; leave it out"
        )


def settings_for(layout: Layout, settings: ImageSettings, fit: str | None) -> ImageSettings:
    """`fit.fitted`. Raises RequestError for a fit that images seen in tiles or at native resolution do not have."""
    if fit == "released" and settings.within and not settings.interpolated:  # pi0's pictures, as openpi prepares them
        return replace(settings, resample="bilinear", centred=True)
    if fit == "released":
        layout.released()
        return settings
    if fit is None:
        return settings
    if layout.max_views > 1 or settings.own_size:
        form = "at native resolution" if settings.own_size else "in tiles"
        raise RequestError(
            f"fit {fit!r:.20} has no effect here: this model sees images of any shape {form}; leave it out"
        )
    return fitted(settings, fit)
