"""From RGB pixels to the vision graph's `pixel_values`, with the numbers of Hugging Face's PIL processors.

A picture of another shape than the tower's is fitted to it: `crop` cuts off what lies beyond the middle, `pad` puts
bars of the mean colour around the picture, `squash` stretches it. Without a choice it is treated as the checkpoint's
image processor says, which need not be how the model was trained: `docs/how-to/pictures.md` lists the checkpoints.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.vision.bilinear import resized
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.limits import MAX_PIXELS, MAX_RESIZED_PIXELS, MAX_RESIZED_SIDE

FITS = ("crop", "pad", "squash")
WORTH_A_NOTE = 0.05  # of the picture

_log = logging.getLogger("vtx")
noted = threading.Event()  # once per process: pictures of one camera all have one shape


def preprocess(image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
    """The vision graph's input for one picture, float32 [3, height, width].

    If the crop is larger than the picture, black surrounds it. Raises ImageError if the padded or resized picture would
    not fit the limits.
    """
    try:
        image = to_rgb(image)
        if settings.pad:
            side = max(image.size)
            if side**2 > MAX_PIXELS:
                raise ImageError(
                    f"the image is {image.width}x{image.height} pixels, padded to a square it would be {side}x{side}; "
                    f"the limit is {MAX_PIXELS:,} in total; shrink its longer side to {math.isqrt(MAX_PIXELS)}"
                )
            square = Image.new("RGB", (side, side), settings.pad)
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = square
        if settings.within:
            return _within(image, settings)
        width, height = resized_size(*image.size, settings.resize)
        if settings.resize is not None:
            if max(width, height) > MAX_RESIZED_SIDE or width * height > MAX_RESIZED_PIXELS:
                shorter = min(width, height)
                ratio = min(MAX_RESIZED_SIDE, MAX_RESIZED_PIXELS // shorter) // shorter
                raise ImageError(
                    f"the image is {image.width}x{image.height} pixels; its sides may differ at most {ratio}-fold, as "
                    f"it is resized to {width}x{height} before the crop; cut off some of its longer side"
                )
            image = image.resize((width, height), Image.Resampling[settings.resample.upper()])
        shown_height, shown_width = settings.size
        x0 = (width - shown_width) // 2
        top = (height - shown_height) // 2
        return normalised(image.crop((x0, top, x0 + shown_width, top + shown_height)), settings)
    except MemoryError as error:
        raise ImageError("no memory left to resize the image; shrink it, or free memory") from error


def _within(image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
    height, width = settings.size
    if settings.centred or settings.ended:  # with openpi's rounding
        ratio = max(image.width / width, image.height / height)
        sides = max(1, int(image.width / ratio)), max(1, int(image.height / ratio))
        x0 = width - sides[0]
        top = height - sides[1]
        if settings.centred:
            x0 //= 2
            top //= 2
        out = normalised(Image.new("RGB", (width, height)), settings)
    else:
        scale = min(height / image.height, width / image.width)
        sides = max(1, int(image.width * scale)), max(1, int(image.height * scale))
        x0 = top = 0
        out = np.zeros((3, height, width), np.float32)
    if settings.interpolated and sides != image.size:
        numbers = normalised(image, settings).transpose(1, 2, 0)
        pixels = resized(numbers, sides[1], sides[0]).transpose(2, 0, 1)
    else:
        pixels = normalised(image.resize(sides, Image.Resampling[settings.resample.upper()]), settings)
    out[:, top : top + sides[1], x0 : x0 + sides[0]] = pixels
    return out


def normalised(image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
    """An RGB picture of the size that the vision graph takes, float32 [3, height, width]."""
    rescaled = (np.arange(256) * settings.rescale).astype(np.float32)  # rounded to float32 after each step, as HF does
    mean = np.array(settings.mean, np.float32)[:, None]
    std = np.array(settings.std, np.float32)[:, None]
    tables: NDArray[np.float32] = (rescaled - mean) / std  # of each byte's value, [3, 256]
    pixels = np.asarray(image)
    out = np.empty((3, image.height, image.width), np.float32)
    for channel, table in enumerate(tables):
        np.take(table, pixels[..., channel], out=out[channel])
    return out


def resized_size(width: int, height: int, resize: int | tuple[int, int] | None) -> tuple[int, int]:
    """(width, height) after `resize`."""
    if resize is None:
        return width, height
    if isinstance(resize, tuple):
        return resize[1], resize[0]
    longer = int(resize * max(width, height) / min(width, height))
    return (resize, longer) if width <= height else (longer, resize)


def trained_fit(settings: ImageSettings) -> str:
    """The one of `FITS` that the checkpoint's settings apply; `none` if images keep their shape."""
    if settings.own_size or settings.within:
        return "none"
    if settings.pad:
        return "pad"
    return "squash" if isinstance(settings.resize, tuple) else "crop"


def fitted(settings: ImageSettings, fit: str | None) -> ImageSettings:
    """The settings that treat pictures of another shape by `fit`; unchanged if it is None or theirs already.

    Raises RequestError for a fit that is none of `FITS`, or `pad` to a shape that is not a square.
    """
    if fit is None:
        return settings
    if fit not in FITS:
        raise RequestError(f"fit is {str(fit)[:20]!r}; it must be one of {', '.join(FITS)}, or left out")
    if settings.within:
        raise RequestError(f"fit {fit!r} has no effect here: pictures keep their shape; leave it out")
    if fit == trained_fit(settings):
        return settings
    height, width = settings.size
    if fit == "squash":
        return replace(settings, pad=None, resize=(height, width), crop=None)
    if fit == "crop":
        return replace(settings, pad=None, resize=max(height, width), crop=(height, width))
    if height != width:
        raise RequestError(f"fit 'pad' makes squares, this model takes {width}x{height}; use crop or squash")
    pad = 127, 127, 127  # grey if the processor does not normalise, else the value that becomes 0, rounded as in LLaVA
    if any(settings.mean):
        red, green, blue = (int(min(max(x / (255 * settings.rescale), 0.0), 1.0) * 255) for x in settings.mean)
        pad = red, green, blue
    return replace(settings, pad=pad, resize=(height, width), crop=None)


def square_settings(settings: ImageSettings) -> ImageSettings:
    """The settings by which LLaVA-OneVision squares one of several pictures, as transformers' processor has it.

    Its bars are int(255 * mean), however pixel values are scaled. Raises RequestError if that is not a colour,
    or if the processor does not normalise: its mean is then unknown here.
    """
    bars = tuple(int(255 * mean) for mean in settings.mean)
    if not all(0 <= part <= 255 for part in bars) or (settings.mean, settings.std) == ((0, 0, 0), (1, 1, 1)):
        raise RequestError(
            f"several images get bars of the image processor's mean colour, and its mean of {list(settings.mean)} is "
            "not one; ask about one image at a time, or about square ones"
        )
    red, green, blue = bars
    return replace(fitted(settings, "pad"), pad=(red, green, blue))


def discarded(width: int, height: int, settings: ImageSettings) -> tuple[float, float]:
    """The parts of a picture's width and height, from 0 to 1, that are lost because its shape is not the crop's.

    One of both is 0: the part that pictures of the right shape lose too is left out.
    """
    if settings.pad or settings.crop is None:
        return 0.0, 0.0
    resized_width, resized_height = resized_size(width, height, settings.resize)
    crop_height, crop_width = settings.crop
    across = min(crop_width / resized_width, 1.0)
    down = min(crop_height / resized_height, 1.0)
    return 1.0 - across / max(across, down), 1.0 - down / max(across, down)


def shown_region(width: int, height: int, settings: ImageSettings) -> tuple[float, float, float, float]:
    """The part of a picture that the vision graph's input shows, in the picture's pixels: left, top, right, bottom.

    With bars it is larger than the picture.
    """
    x0 = 0
    top = 0
    across = width
    down = height
    if settings.pad:
        across = down = max(width, height)
        x0 = -((across - width) // 2)
        top = -((down - height) // 2)
    columns, rows = resized_size(across, down, settings.resize)
    shown_height, shown_width = settings.size
    scale_x = across / columns
    scale_y = down / rows
    first_x = x0 + (columns - shown_width) // 2 * scale_x
    first_y = top + (rows - shown_height) // 2 * scale_y
    return first_x, first_y, first_x + shown_width * scale_x, first_y + shown_height * scale_y


@contextmanager
def without_notes() -> Iterator[None]:
    """Suppress the note about what a crop leaves out, for vtx's own pictures."""
    before = noted.is_set()
    noted.set()
    try:
        yield
    finally:
        if not before:
            noted.clear()


def note_discarded(width: int, height: int, settings: ImageSettings) -> None:
    """Log, once per process, that a centre crop leaves out a part worth mentioning."""
    across, down = discarded(width, height, settings)
    if max(across, down) <= WORTH_A_NOTE or noted.is_set():
        return
    noted.set()
    _log.warning(
        "the centre crop leaves out %.0f%% of a %dx%d picture, at its %s, as the checkpoint's image processor has it; "
        "--fit pad (fit='pad') shows all of it with bars, --fit squash stretches it",
        100 * max(across, down),
        width,
        height,
        "left and right" if across > down else "top and bottom",
    )
