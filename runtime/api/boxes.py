"""Boxes that an answer names, in the pixels of the picture as it was given, and not as the model sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import RequestError

if TYPE_CHECKING:
    from vtx.runtime.bundle.spec.manifest import Manifest
    from vtx.runtime.bundle.spec.text_settings import BoxForm
    from vtx.runtime.session.encoded_images import PreparedImage

NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
EDGES = " \t\r\n,;:.()[]{}`\"'"  # of a label
MARK = re.compile("<[^<>]*>")


@dataclass(frozen=True, slots=True)
class Box:
    """A box in pixels of the picture, from its left top corner on, and the words that the answer has for it."""

    label: str
    left: float
    top: float
    right: float
    bottom: float


def check_boxes(manifest: Manifest, images: Sequence[PreparedImage] | None = None) -> None:
    """Raise RequestError if the model has no stated form of boxes, or `images` are not one picture."""
    if manifest.text.boxes is None:
        raise RequestError(
            f"{manifest.model.name} has no stated form of boxes in its answers, or was exported before vtx knew it; "
            "leave boxes out, or export again"
        )
    if images is not None and [image.kind for image in images] != ["image"]:
        raise RequestError(f"boxes are of one picture, and {len(images)} images and videos are given; ask about one")


def read_boxes(text: str, form: BoxForm, image: PreparedImage) -> tuple[Box, ...]:
    """The boxes in the text of an answer about an image; what is not in the model's form is none."""
    left, top, right, bottom = image.region
    width, height = image.size
    _, rows, columns = image.pixels.shape
    across, down = (columns, rows) if form.scale is None else (form.scale, form.scale)
    boxes = list[Box]()
    for label, numbers in _occurrences(text, form):
        first, second, third, fourth = numbers
        xs, ys = ((second, fourth), (first, third)) if form.rows_first else ((first, third), (second, fourth))
        horizontal = sorted(min(max(left + x / across * (right - left), 0.0), float(width)) for x in xs)
        vertical = sorted(min(max(top + y / down * (bottom - top), 0.0), float(height)) for y in ys)
        boxes.append(Box(label, horizontal[0], vertical[0], horizontal[1], vertical[1]))
    return tuple(boxes)


def _occurrences(text: str, form: BoxForm) -> Iterator[tuple[str, list[float]]]:
    """The label and the numbers of each box; one without a label has that of the box before it."""
    matches = list(_pattern(form).finditer(text))
    end = 0
    label = ""
    for number, match in enumerate(matches):
        following = matches[number + 1].start() if number + 1 < len(matches) else len(text)
        if form.label == "inside":
            label = _label_inside(text, match)
        elif form.label == "after":
            label = _cleaned(text[match.end() : following].partition(";")[0])
        else:
            label = _cleaned(text[end : match.start()]) or label
        yield label, [float(digits) for digits in match.groups()]
        end = match.end()


def _pattern(form: BoxForm) -> re.Pattern[str]:
    parts = {"#": NUMBER, " ": r"[ \t\r\n]*"}
    return re.compile("".join(parts.get(character, re.escape(character)) for character in form.pattern))


def _label_inside(text: str, match: re.Match[str]) -> str:
    """The label of the JSON object around a box; empty if it has none, or is cut."""
    begin = text.rfind("{", 0, match.start())
    end = text.find("}", match.end())
    if min(begin, end) < 0:
        return ""
    try:
        fields = parse_json(text[begin : end + 1].encode(), "a box", error=RequestError)
    except RequestError:
        return ""
    label = fields.get("label") if isinstance(fields, dict) else None
    return label if isinstance(label, str) else ""


def _cleaned(text: str) -> str:
    """The last line of a text, without marks and punctuation around it."""
    return MARK.sub("", text).strip(EDGES).rpartition("\n")[2].strip(EDGES)
