"""A picture of the patches that survive: the image in one panel per cut, with a legend, drawn with pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vtx.runtime.api.answer import Stats
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import RequestError, printable
from vtx.runtime.policies.base import Policy
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.session.reduction_report import Kept, ReductionReport

PANEL = 336  # pixels a side, at least
MARGIN = 12
HEADER = 32  # the question, above its panels
CAPTION = 30  # the caption, above each panel
LEGEND = 30
TEXT = 22  # heights of letters, to be read at two thirds of their size
SMALL = 20
DIMMED = 0.2  # brightness of a patch whose token is gone
WINDOW = 3  # patches a side of a merged window
MERGED = (255, 200, 0)
KEY = (0, 160, 220)
INK = (20, 20, 20)
EDGE = (190, 190, 190)

Panel = tuple[str, Image.Image]


def check_shown(policy: Policy, pictures: Sequence[PreparedImage], settings: ImageSettings) -> None:
    """Raise RequestError if no patch could be drawn."""
    if not pictures:
        raise RequestError("--show-tokens has nothing to show: there is no image; name one, or leave it out")
    if any(picture.kind == "video" for picture in pictures):
        raise RequestError("--show-tokens draws images and no videos; leave it out, or give frames as images")
    if settings.own_size:
        raise RequestError(
            "--show-tokens draws a square of patches, and this model's images have any shape; leave it out"
        )
    if not policy.reductions and policy.rest_cut is None:
        raise RequestError(
            "--show-tokens has nothing to show without a reduction or a rest; add --reduce, e.g. --reduce fastv, or "
            "--rest, e.g. --rest 10%"
        )


def draw_tokens(
    questions: Sequence[str], answers: Sequence[Stats], pictures: Sequence[PreparedImage], manifest: Manifest
) -> Image.Image:
    """One row for each question and image: the image as the tower sees it, lit where a token is left after each cut."""
    side = manifest.model.tower.grid
    rows = list[tuple[str, list[Panel]]]()
    reductions = [(q, stats.reduced) for q, stats in zip(questions, answers, strict=True) if stats.reduced is not None]
    for question, report in reductions:
        for number, picture in enumerate(pictures):
            values = picture.pixels.transpose(1, 2, 0) * np.array(manifest.image.std) + np.array(manifest.image.mean)
            pixels: NDArray[np.float64] = (values / manifest.image.rescale).clip(0, 255)  # as the tower sees them
            entered = len(report.kept[0].patches[number])
            merged = len(report.merged[number])
            covers = set(range(side**2)) <= set(report.kept[0].patches[number])  # its first panel is the image itself
            panels: list[Panel] = [] if covers else [("the image", _enlarged(pixels))]
            for remainder in report.kept:
                caption = f"layer {remainder.layer}: {len(remainder.patches[number])} of {entered} ({remainder.by})"
                if remainder.layer == 1:
                    caption = f"{entered} tokens enter" + (f", {merged} merged" if merged else "")
                panels.append((caption, _panel(pixels, side, report, remainder, number)))
            rows.append((question if len(pictures) == 1 else f"image {number + 1}: {question}", panels))
    reports = [report for _, report in reductions]
    return _sheet(rows, _legend(any(map(any, (r.merged for r in reports))), any(map(any, (r.keys for r in reports)))))


def _panel(pixels: NDArray[np.float64], side: int, report: ReductionReport, kept: Kept, number: int) -> Image.Image:
    """The image, `side` patches a side, `kept` ones lit; of several views the first, which shows all of the image."""
    merged = set(report.merged[number])
    alive = {index for index in kept.patches[number] if 0 <= index < side**2}
    lit = np.zeros((side, side), bool)
    for index in alive:
        y, x, reach = *divmod(index, side), WINDOW if index in merged else 1
        lit[y : y + reach, x : x + reach] = True
    height, width = pixels.shape[:2]
    bright = lit[np.arange(height) * side // height][:, np.arange(width) * side // width]
    image = _enlarged(np.where(bright[..., None], pixels, pixels * DIMMED))
    draw = ImageDraw.Draw(image)
    step = image.width / side
    keys = set(report.keys[number])
    for index in alive & (merged | keys):
        y, x = divmod(index, side)
        if index in merged:
            _frame(draw, x * step, y * step, WINDOW * step)
        if index in keys:
            _corner(draw, x * step, y * step, step)
    return image


def _enlarged(pixels: NDArray[np.float64]) -> Image.Image:
    scale = max(1, math.ceil(PANEL / pixels.shape[1]))
    image = Image.fromarray(pixels.round().astype(np.uint8))
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def _frame(draw: ImageDraw.ImageDraw, x: float, y: float, size: float) -> None:
    draw.rectangle((x, y, x + size - 1, y + size - 1), outline=MERGED, width=2)


def _corner(draw: ImageDraw.ImageDraw, x: float, y: float, size: float) -> None:
    draw.polygon([(x, y), (x + size / 2, y), (x, y + size / 2)], fill=KEY)


def _sheet(rows: Sequence[tuple[str, Sequence[Panel]]], legend: Image.Image) -> Image.Image:
    panel = rows[0][1][0][1]
    width = panel.width + MARGIN
    height = HEADER + CAPTION + panel.height + MARGIN
    columns = max(len(panels) for _, panels in rows)
    size = MARGIN + max(width * columns, legend.width), MARGIN + height * len(rows) + LEGEND + MARGIN
    sheet = Image.new("RGB", size, "white")
    for number, (title, panels) in enumerate(rows):
        top = MARGIN + number * height
        _write(sheet, (MARGIN, top), title, TEXT, sheet.width - 2 * MARGIN)
        for column, (caption, image) in enumerate(panels):
            x0 = MARGIN + column * width
            _write(sheet, (x0, top + HEADER), caption, SMALL, image.width)
            y = top + HEADER + CAPTION
            sheet.paste(image, (x0, y))
            ImageDraw.Draw(sheet).rectangle((x0 - 1, y - 1, x0 + image.width, y + image.height), outline=EDGE)
    sheet.paste(legend, (MARGIN, sheet.height - LEGEND - MARGIN))
    return sheet


def _legend(merged: bool, keys: bool) -> Image.Image:
    entries = {"lit: goes on": True, "dark: left out": True, "merged window": merged, "key token": keys}
    labels = [label for label, there in entries.items() if there]
    step = 190
    square = LEGEND - 8
    image = Image.new("RGB", (step * len(labels), LEGEND), "white")
    draw = ImageDraw.Draw(image)
    for number, label in enumerate(labels):
        x = number * step
        light = 215 if label != "dark: left out" else round(215 * DIMMED)
        draw.rectangle((x, 0, x + square, square), fill=(light, light, light))
        if label == "merged window":
            _frame(draw, x, 0, square + 1)
        if label == "key token":
            _corner(draw, x, 0, square)
        _write(image, (x + square + 8, 0), label, SMALL, step)
    return image


def _write(image: Image.Image, at: tuple[int, int], text: str, height: int, width: int) -> None:
    font = ImageFont.load_default(height)
    line = printable(" ".join(text.split()))[:400]
    end = ""
    while line and font.getlength(line + end) > width:
        line = line[:-1]
        end = " ..."
    ImageDraw.Draw(image).text(at, line + end, fill=INK, font=font)
