"""Plans of images: the views that the tower sees of one image, and the order and text of their tokens.

A layout makes a plan from an image's size alone; how it is carried out is the same for all layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import PARTS
from vtx.runtime.bundle.spec.names import RECEIVED
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.vision import bilinear
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.preprocess import normalised, preprocess, square_settings
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, Patches, PromptImage, joined

Views = NDArray[np.float32] | list[NDArray[np.float32]]  # a list if their sizes may differ
Size = tuple[int, int]  # width and height, or columns and rows
Box = tuple[int, int, int, int]  # left, top, right and bottom


@dataclass(frozen=True, slots=True)
class View:
    """A pass of the tower that gives `tokens`: the image, resized to each of `sizes` in turn, and of that the `box`.

    With a `canvas` the resized image is in the middle of black of this size. Sizes and boxes are in pixels.
    """

    tokens: int
    sizes: tuple[Size, ...] = ()
    canvas: Size | None = None
    box: Box | None = None

    def tiles(self, columns: int, rows: int) -> tuple[View, ...]:
        """The view in equal tiles, row by row, of as many tokens each."""
        width, height = self.canvas or self.sizes[-1]
        across = width // columns
        down = height // rows
        corners = [(x, y) for y in range(0, height, down) for x in range(0, width, across)]
        return tuple(replace(self, box=(x, y, x + across, y + down)) for x, y in corners)

    def picture(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        """The picture of which the view is a part."""
        for size in self.sizes:
            image = image.resize(size, resample)
        if self.canvas is None:
            return image
        width, height = self.canvas
        canvas = Image.new("RGB", self.canvas)
        canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
        return canvas


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The order of the tokens of an overview and of `columns` x `rows` tiles of `side` x `side` tokens after it.

    The tiles' tokens form one grid, of which the `box` is kept and shrunk to `size` bilinearly. `newlines`: a learned
    newline ends each row. Without tiles one newline ends the overview.
    """

    side: int
    columns: int = 1
    rows: int = 0
    box: Box = (0, 0, 0, 0)
    size: Size = (0, 0)
    newlines: bool = True

    @property
    def tokens(self) -> int:
        """The number of all tokens."""
        columns, rows = self.size
        return self.side**2 + (rows * (columns + self.newlines) if self.rows else 1)

    def arrange(self, views: Sequence[ImageTokens], newline: HiddenStates) -> ImageTokens:
        """The tokens of the views in this order. Raises RequestError if views have merged windows."""
        each = self.side**2
        if any(len(view) != each for view in views):
            raise RequestError(
                "windows cannot merge in an image of tiles: its tokens would be no grid; leave merging out"
            )
        candidates = joined([*views, ImageTokens.newlines(newline)], self.columns)
        overview = np.arange(each)
        if not self.rows:
            return candidates.take(np.append(overview, len(candidates) - 1))
        # the index of each token of the grid: the tiles' tokens follow the overview in raster order
        tiles = np.arange(self.rows * self.columns * each).reshape(self.rows, self.columns, self.side, self.side) + each
        uncut = tiles.transpose(0, 2, 1, 3).reshape(self.rows * self.side, self.columns * self.side)
        left, top, right, bottom = self.box
        grid = uncut[top:bottom, left:right]
        across, down = self.size
        shrinks = (down, across) != grid.shape
        if shrinks:  # a token of four has the patch index of the nearest
            hidden = bilinear.resized(candidates.hidden[grid], down, across)
            grid = grid[bilinear.nearest(grid.shape[0], down)[:, None], bilinear.nearest(grid.shape[1], across)]
        ends = np.full((down, 1), len(candidates) - 1)  # the one newline serves all rows
        grid = np.concatenate([grid, ends], 1) if self.newlines else grid
        tokens = candidates.take(np.concatenate([overview, grid.ravel()]))
        if shrinks:
            tokens.hidden[each:].reshape(down, across + 1, -1)[:, :-1] = hidden
        if RECEIVED not in candidates.patches.signals:
            return tokens
        return replace(tokens, uncut=candidates.take(np.concatenate([overview, uncut.ravel()])))


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The passes of the tower that an image takes, and its tokens in the prompt.

    `texts`: the prompt's text before, between and after `spans` of tokens, which are those of each view unless given;
    without texts all tokens are one span. `number`: as of `PromptImage`. `squared`: the image is padded to a square.

    Tokens follow view by view, or in the order of a `grid` of tiles. `shape`: columns and rows of the only view's
    tokens, one a patch, row by row; `placed`: each has its row and column as position.
    """

    views: tuple[View, ...]
    texts: tuple[str, ...] = ()
    spans: tuple[int, ...] = ()
    number: tuple[str, str] | None = None
    squared: bool = False
    grid: TileGrid | None = None
    shape: Size | None = None
    placed: bool = False

    @property
    def tokens(self) -> int:
        """The number of the image's tokens."""
        return sum(view.tokens for view in self.views) if self.grid is None else self.grid.tokens

    @property
    def prompt(self) -> PromptImage:
        """The image in a prompt."""
        if not self.texts:
            return PromptImage((self.tokens,))
        return PromptImage(self.spans or tuple(view.tokens for view in self.views), self.texts, number=self.number)

    def pixels(self, image: Image.Image, settings: ImageSettings) -> Views:
        """The tower's inputs for an image of this plan's size: float32 [views, 3, height, width], or a list of them.

        Raises ImageError if there is no memory for them.
        """
        image = to_rgb(image)
        settings = square_settings(settings) if self.squared else settings
        resample = Image.Resampling[settings.resample.upper()]
        pictures = dict[tuple[tuple[Size, ...], Size | None], Image.Image]()
        inputs = list[NDArray[np.float32]]()
        try:
            for view in self.views:
                source = view.sizes, view.canvas
                if source not in pictures:
                    pictures[source] = view.picture(image, resample)
                picture = pictures[source]
                part = picture if view.box is None else picture.crop(view.box)
                inputs.append(normalised(part, settings) if settings.own_size else preprocess(part, settings))
        except MemoryError as error:
            raise ImageError("no memory left to resize the image; shrink it, or free memory") from error
        if len(inputs) == 1:
            return inputs[0][None]
        return inputs if settings.own_size else np.stack(inputs)

    def arrange(self, views: Sequence[ImageTokens], newline: HiddenStates) -> ImageTokens:
        """The image's tokens from those of its views; `newline` [1, hidden], [0, hidden] if none."""
        if self.grid is not None:
            return self.grid.arrange(views, newline)
        if self.shape is None:
            return joined(views) if len(views) > 1 else views[0]
        (tokens,) = views
        columns, rows = self.shape
        count = columns * rows
        tokens = replace(tokens, patches=Patches(np.arange(count), np.zeros(count, bool), tokens.patches.signals))
        if not self.placed:
            return tokens
        return replace(tokens, offsets=squares(columns, rows), span=max(columns, rows))


def own_shape(columns: int, rows: int, unit: int) -> View:
    """The whole image as a view of `columns` x `rows` tokens of `unit` x `unit` pixels."""
    return View(columns * rows, ((columns * unit, rows * unit),))


def squares(columns: int, rows: int) -> NDArray[np.int64]:
    """Offsets [tokens, 3] of the tokens of a grid, row by row: time 0, and their row and column."""
    offsets = np.zeros((columns * rows, PARTS), np.int64)
    offsets[:, 1], offsets[:, 2] = np.divmod(np.arange(columns * rows), columns)
    return offsets
