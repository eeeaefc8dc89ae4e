"""Fitting a picture to the shape that the vision tower takes.

`crop` cuts off what lies beyond the middle, `pad` puts bars of the mean colour around the picture, `squash` stretches
it. Without a choice a picture is treated as the checkpoint's image processor says, which need not be how the model was
trained: `docs/how-to/pictures.md` lists the checkpoints.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import RequestError
from vtx.runtime.vision.preprocess import resized_size

FITS = ("crop", "pad", "squash")
WORTH_A_NOTE = 0.05  # of the picture

_log = logging.getLogger("vtx")
noted = threading.Event()  # once per process: pictures of one camera all have one shape


def trained_fit(settings: ImageSettings) -> str:
    """The one of `FITS` that the checkpoint's settings apply; `none` if images keep their shape."""
    if settings.own_size:
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
    across, down = min(crop_width / resized_width, 1.0), min(crop_height / resized_height, 1.0)
    return 1.0 - across / max(across, down), 1.0 - down / max(across, down)


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
        100 * max(across, down), width, height, "left and right" if across > down else "top and bottom",
    )  # fmt: skip
