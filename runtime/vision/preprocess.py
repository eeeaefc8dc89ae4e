"""From RGB pixels to the vision graph's `pixel_values`, with the numbers of Hugging Face's PIL processors."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import ImageError
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.limits import MAX_PIXELS, MAX_RESIZED_PIXELS, MAX_RESIZED_SIDE


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
        left, top = (width - shown_width) // 2, (height - shown_height) // 2
        return normalised(image.crop((left, top, left + shown_width, top + shown_height)), settings)
    except MemoryError as error:
        raise ImageError("no memory left to resize the image; shrink it, or free memory") from error


def normalised(image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
    """An RGB picture of the size that the vision graph takes, float32 [3, height, width]."""
    rescaled = (np.arange(256) * settings.rescale).astype(np.float32)  # rounded to float32 after each step, as HF does
    mean, std = (np.array(values, np.float32)[:, None] for values in (settings.mean, settings.std))
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
