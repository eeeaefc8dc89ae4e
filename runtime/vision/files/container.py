"""An image file before it is decoded: its format, its size, and the parts of it that make pixels."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.limits import MAX_PIXELS, MAX_SIDE


@dataclass(frozen=True, slots=True)
class Container:
    """One frame without metadata: `pieces` joined are a file of the format `kind`.

    `width` and `height` are the stored canvas's; `orientation` is EXIF's, 1 for upright.
    """

    kind: str
    width: int
    height: int
    pieces: tuple[bytes | memoryview, ...]
    orientation: int = 1


class DamagedError(Exception):
    """The file contradicts its format; the message says how."""


def check_size(name: str, width: int, height: int) -> None:
    """Raise ImageError for a picture without pixels, or with too many."""
    if min(width, height) < 1:
        raise ImageError(f"{name} is {width}x{height} pixels: there is nothing to see; give an image with pixels")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError(
            f"{name} is {width}x{height} pixels; the limit is {MAX_SIDE:,} a side and {MAX_PIXELS:,} in total; "
            "shrink it first"
        )


def too_many(name: str, parts: str, limit: int) -> ImageError:
    """The error for a file with more parts than an honest one has."""
    return ImageError(f"{name} has over {limit:,} {parts}, the limit; open it in an image editor and save it again")
