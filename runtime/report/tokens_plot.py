"""A picture of which patches survive: one panel for each cut of each image, drawn with pillow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vtx.runtime.api.answer import Stats
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import RequestError
from vtx.runtime.policies.policy import Policy
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.session.reduction_report import Kept, ReductionReport

PANEL = 336  # pixels a side, at least
MARGIN = 8
CAPTION = 16
DIMMED = 0.2  # what is left of the light of a patch that has gone
WINDOW = 3  # patches a side of a merged window
MERGED = (255, 200, 0)
KEY = (0, 220, 255)
INK = (20, 20, 20)


def check_shown(policy: Policy, pictures: Sequence[PreparedImage]) -> None:
    """Raise RequestError where no patch could be drawn."""
    if not pictures:
        raise RequestError("--show-tokens has nothing to show: there is no image; name one, or leave it out")
    if not policy.reductions:
        raise RequestError("--show-tokens has nothing to show without a reduction; add --reduce, as --reduce fastv")


def draw_tokens(answers: Sequence[Stats], pictures: Sequence[PreparedImage], manifest: Manifest) -> Image.Image:
    """One row for each answer and image, one panel for each cut: what has gone is dark.

    Merged windows have a yellow frame, key rows a blue corner.
    """
    shown = [stats.reduced for stats in answers if stats.reduced is not None]
    side = manifest.model.tower.grid
    rows = [
        [
            _captioned(panel, f"question {question + 1}, image {number + 1}: {_said(found, step, number)}")
            for step, panel in enumerate(_panels(_pixels(picture, manifest.image), side, found, number))
        ]
        for question, found in enumerate(shown)
        for number, picture in enumerate(pictures)
    ]
    return _sheet(rows)


def _sheet(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    width, height = rows[0][0].width + MARGIN, rows[0][0].height + MARGIN
    sheet = Image.new("RGB", (MARGIN + width * max(map(len, rows)), MARGIN + height * len(rows)), "white")
    for y, row in enumerate(rows):
        for x, panel in enumerate(row):
            sheet.paste(panel, (MARGIN + x * width, MARGIN + y * height))
    return sheet


def _pixels(picture: PreparedImage, settings: ImageSettings) -> NDArray[np.float64]:
    """The picture as the tower saw it, [height, width, 3], 0 to 255."""
    values = picture.pixels.transpose(1, 2, 0) * np.array(settings.std) + np.array(settings.mean)
    pixels: NDArray[np.float64] = (values / settings.rescale).clip(0, 255)
    return pixels


def _panels(pixels: NDArray[np.float64], side: int, found: ReductionReport, number: int) -> Iterator[Image.Image]:
    for kept in found.kept:
        yield _panel(pixels, side, found, kept, number)


def _panel(pixels: NDArray[np.float64], side: int, found: ReductionReport, kept: Kept, number: int) -> Image.Image:
    """The image, `side` patches a side, with those of `kept` lit."""
    merged, alive = set(found.merged[number]), set(kept.patches[number]) - {-1}
    lit = np.zeros((side, side), bool)
    for place in alive:
        y, x, reach = *divmod(place, side), WINDOW if place in merged else 1
        lit[y : y + reach, x : x + reach] = True
    height, width = pixels.shape[:2]
    bright = lit[np.arange(height) * side // height][:, np.arange(width) * side // width]
    dimmed = np.where(bright[..., None], pixels, pixels * DIMMED).round().astype(np.uint8)
    scale = max(1, math.ceil(PANEL / width))
    image = Image.fromarray(dimmed).resize((width * scale, height * scale), Image.Resampling.NEAREST)
    draw, step = ImageDraw.Draw(image), image.width / side
    for place in alive & merged:
        y, x = divmod(place, side)
        draw.rectangle((x * step, y * step, (x + WINDOW) * step - 1, (y + WINDOW) * step - 1), outline=MERGED)
    for place in alive & set(found.keys[number]):
        y, x = divmod(place, side)
        draw.polygon([(x * step, y * step), ((x + 0.5) * step, y * step), (x * step, (y + 0.5) * step)], fill=KEY)
    return image


def _said(found: ReductionReport, step: int, number: int) -> str:
    kept, entered = found.kept[step], len(found.kept[0].patches[number])
    if kept.layer == 1:
        return f"{entered} rows enter, {len(found.merged[number])} merged"
    return f"{len(kept.patches[number])} of {entered} go into layer {kept.layer} ({kept.by})"


def _captioned(image: Image.Image, text: str) -> Image.Image:
    panel = Image.new("RGB", (image.width, image.height + CAPTION), "white")
    panel.paste(image, (0, CAPTION))
    ImageDraw.Draw(panel).text((0, 2), text, fill=INK)
    return panel
