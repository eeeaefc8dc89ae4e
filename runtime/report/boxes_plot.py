"""A picture with the boxes that answers name, drawn with pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from vtx.runtime.errors import printable
from vtx.runtime.vision.image import to_rgb

if TYPE_CHECKING:
    from vtx.runtime.api.boxes import Box
    from vtx.runtime.vision.video import Video

COLOURS = ((230, 25, 75), (0, 130, 200), (60, 160, 60), (245, 130, 48), (145, 30, 180))  # each box the next
LETTERS = 40  # of a side, for the height of labels
LABEL = 60  # characters


def draw_boxes(picture: Image.Image | Video, boxes: Sequence[Box]) -> Image.Image:
    """The picture in its own size, with a frame and its label for each box."""
    assert isinstance(picture, Image.Image), "boxes are refused for videos"
    canvas = to_rgb(picture).copy()
    draw, thick = ImageDraw.Draw(canvas), max(1, max(canvas.size) // 400)
    font = ImageFont.load_default(max(10, max(canvas.size) // LETTERS))
    for number, box in enumerate(boxes):
        colour = COLOURS[number % len(COLOURS)]
        last = canvas.width - 1, canvas.height - 1
        corners = [min(round(box.left), last[0]), min(round(box.top), last[1])]
        corners += [min(round(box.right), last[0]), min(round(box.bottom), last[1])]
        draw.rectangle(corners, outline=colour, width=thick)
        if label := printable(" ".join(box.label.split()))[:LABEL]:
            place = corners[0] + thick, corners[1] + thick
            draw.rectangle(draw.textbbox(place, label, font), fill=colour)
            draw.text(place, label, (255, 255, 255), font)
    return canvas
