"""From an untrusted picture to RGB pixels.

Reading is bounded before it costs anything: bytes while they are read, pixels, scans and chunks from the file's
structure, decoding by a deadline. No lock is held and nothing of the process is changed, so threads decode side by
side; each takes up to 256 MiB for the largest picture.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.files.container import TAG, TRANSPOSED, UPRIGHT, check_size
from vtx.runtime.vision.files.formats import check_formats, read_container
from vtx.runtime.vision.files.source import BGR, ImageSource, from_array, read_file
from vtx.runtime.vision.limits import DEFAULT_FORMATS, MAX_DECODE_SECONDS

__all__ = ["ImageSource", "image_size", "load_image", "to_rgb"]

BAND_PIXELS = 4 << 20
WIDE_MODES = ("I", "F")  # Pillow's: grey of 16 and 32 bits, which its conversions clip at 255


def load_image(source: ImageSource, formats: Sequence[str] = DEFAULT_FORMATS) -> Image.Image:
    """A picture as RGB: the first frame, upright by its EXIF tag, transparency over white.

    `source` is a path of a regular file, the bytes of a file, a data URL in base64, a binary stream (read from where
    it is), a PIL image (may be returned itself), or an array of uint8: [height, width] grey, [height, width, 3]
    RGB, in `vtx.bgr(...)` BGR, with a fourth channel RGBA or BGRA. Of 16 bits a value, the upper 8 count. `formats`
    are names of `KNOWN_FORMATS`; they hold for files only.

    Raises ImageError if it is not an image of these formats, is damaged, or is beyond a limit (`limits.py`).
    """
    formats = check_formats(formats)
    if isinstance(source, (np.ndarray, BGR)):
        with _image_errors("the array"):
            return to_rgb(from_array(source))
    if isinstance(source, Image.Image):
        name = "the given image"
        content = b""
    else:
        file = read_file(source)
        name = file.name
        content = file.content
    with _image_errors(name):
        if isinstance(source, Image.Image):
            check_size(name, *source.size)
            source.load()  # before EXIF: TIFF turns itself upright while loading
            image = to_rgb(source)
            orientation = source.getexif().get(TAG, 1)
        else:
            container = read_container(name, content, formats)
            opened = Image.open(_Metered(name, b"".join(container.pieces)), formats=(container.kind,))
            if opened.size != (container.width, container.height):
                raise ImageError(
                    f"{name} is damaged and cannot be decoded (it states two sizes); save or copy it again"
                )
            opened.load()
            image = to_rgb(opened)
            orientation = container.orientation
        turn = UPRIGHT.get(orientation)
        return image if turn is None else image.transpose(turn)


def image_size(source: ImageSource, formats: Sequence[str] = DEFAULT_FORMATS) -> tuple[int, int]:
    """(width, height) of `load_image(source)`; of a file by its structure, without decoding it. Raises ImageError."""
    if isinstance(source, (np.ndarray, BGR, Image.Image)):
        return load_image(source).size
    file = read_file(source)
    container = read_container(file.name, file.content, check_formats(formats))
    size = container.width, container.height
    return size[::-1] if container.orientation in TRANSPOSED else size


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB, transparency over white; may return the image itself. Raises ImageError for values without a known white."""
    if image.mode.startswith(WIDE_MODES):
        image = _narrow(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    flat = Image.new("RGB", image.size)
    band_height = max(1, BAND_PIXELS // image.width)  # in bands: compositing takes three copies
    for top in range(0, image.height, band_height):
        band = image.crop((0, top, image.width, min(top + band_height, image.height))).convert("RGBA")
        white = Image.new("RGBA", band.size, "white")
        flat.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return flat


def _narrow(image: Image.Image) -> Image.Image:
    """The upper 8 of the 16 bits of each grey value, as of 16-bit colour. Raises ImageError for wider ones."""
    if not (image.mode.startswith("I;16") or image.format == "PNG"):  # Pillow 10 opens a PNG of 16 bits as 32
        values = "floating-point numbers" if image.mode == "F" else "32-bit integers"
        raise ImageError(f"the image's values are {values}, whose white is unknown; scale them to uint8 of 0 to 255")
    wide = np.asarray(image)
    narrow = Image.fromarray((wide >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        narrow.putalpha(Image.fromarray(np.where(wide == transparent, 0, 255).astype(np.uint8)))
    return narrow


class _Metered(BytesIO):
    """A file whose reading fails once this thread has decoded for longer than the limit."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self._name = name
        self._end = time.thread_time() + MAX_DECODE_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self._end:
            raise ImageError(
                f"{self._name} takes over {MAX_DECODE_SECONDS:g} s to decode, the limit; shrink it, or save it again"
            )
        return super().read(size)


@contextlib.contextmanager
def _image_errors(name: str) -> Iterator[None]:
    """Turn the errors of decoders into an ImageError about `name`."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} has more pixels than PIL.Image.MAX_IMAGE_PIXELS allows; shrink it first") from error
    except Exception as error:  # damaged files fail in every corner of the decoders
        if isinstance(error, MemoryError) or "out of memory" in str(error):  # Pillow's decoders raise OSError for both
            raise ImageError(f"no memory left to decode {name}; shrink it, or free memory") from error
        reason = re.sub(r" ?<[^<>]* object at 0x[0-9a-f]+>", "", " ".join(str(error).split()))[:200]
        reason = reason or type(error).__name__
        raise ImageError(f"{name} is damaged and cannot be decoded ({reason}); save or copy it again") from error
