"""From an untrusted picture to the vision graph's `pixel_values`, with the numbers of Hugging Face's PIL processors.

Reading is bounded before it costs anything: bytes while they are read, pixels when only the header is known.
"""

from __future__ import annotations

import math
import os
import stat
import threading
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vtx.runtime.bundle.image_settings import MAX_INPUT_SIDE, ImageSettings
from vtx.runtime.errors import ImageError

MAX_FILE_BYTES = 64 << 20
MAX_PIXELS = 64 << 20  # photos of the 61-megapixel sensors pass; 256 MiB decoded
MAX_SIDE = 16_384
MAX_RESIZED_PIXELS = MAX_SIDE * MAX_INPUT_SIDE  # beyond this only the rows and columns that the crop keeps are made
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none of them starts another program
BAND_PIXELS = 4 << 20
_LIMITS = f"the limit is {MAX_SIDE:,} a side and {MAX_PIXELS:,} in all; shrink it first"

ImageSource: TypeAlias = str | os.PathLike[str] | bytes | BinaryIO | Image.Image

# One image is decoded at a time: it bounds memory, and Python's warning filters belong to the whole process.
_DECODING = threading.Lock()
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _bilinear(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - np.abs(distance), 0.0)


def _bicubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic with a = -1/2."""
    x = np.abs(distance)
    near, far = (1.5 * x - 2.5) * x * x + 1.0, (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_KERNELS: dict[str, tuple[int, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "bilinear": (1, _bilinear),
    "bicubic": (2, _bicubic),
}


def load_image(source: ImageSource) -> Image.Image:
    """Read a picture as RGB: the first frame, upright by its EXIF tag, transparency over white.

    A path must be a regular file; a stream is read from where it stands. May return the given image itself.
    Raises ImageError for what is no image of `FORMATS`, is damaged, or is beyond `MAX_FILE_BYTES`, `MAX_PIXELS`
    or `MAX_SIDE`.
    """
    if isinstance(source, Image.Image):
        name, image = "the given image", source
    else:
        name, content = _read(source)
    with _DECODING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if not isinstance(source, Image.Image):
                image = Image.open(BytesIO(content), formats=FORMATS)
            _check_size(name, *image.size)
            return _upright_rgb(image)
        except ImageError:
            raise
        except UnidentifiedImageError as error:
            raise ImageError(f"{name} is not an image that vtx reads; it reads {', '.join(FORMATS)}") from error
        except Image.DecompressionBombError as error:
            raise ImageError(f"{name} has too many pixels; {_LIMITS}") from error
        except MemoryError as error:
            raise ImageError(f"no memory left to decode {name}; shrink it, or free memory") from error
        except Exception as error:  # damaged files fail in every corner of the decoders
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ImageError(f"{name} is damaged and cannot be decoded ({reason}); save or copy it again") from error


def preprocess(image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
    """The vision graph's input for one picture, float32 [3, height, width].

    Raises ImageError where the padded or resized picture would not fit the limits.
    """
    try:
        image = _squared(_rgb(image), settings.pad) if settings.pad else _rgb(image)
        pixels = np.asarray(_resized_crop(image, settings))
    except MemoryError as error:
        raise ImageError("no memory left to resize the image; shrink it, or free memory") from error
    out = np.empty((3, settings.height, settings.width), np.float32)
    for channel, table in enumerate(_normalised_bytes(settings)):
        out[channel] = table[pixels[..., channel]]
    return out


def _check_size(name: str, width: int, height: int) -> None:
    if min(width, height) < 1:
        raise ImageError(f"{name} is {width}x{height} pixels: there is nothing to see; give an image with pixels")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError(f"{name} is {width}x{height} pixels; {_LIMITS}")


def _read(source: Any) -> tuple[str, bytes]:
    """Name for messages, and the whole content, at most `MAX_FILE_BYTES`."""
    if isinstance(source, bytes):
        name, content = "the given image", source
    elif isinstance(source, (str, os.PathLike)):
        name = f"image {os.fspath(source)!r}"
        content = _read_file(name, source)
    elif callable(getattr(source, "read", None)):
        name = "the image from the stream"
        content = _read_stream(name, source)
    else:
        raise ImageError(f"a {type(source).__name__} is no image; give a path, bytes, a binary stream or a PIL image")
    if not content:
        raise ImageError(f"{name} is empty (0 bytes); save or copy it again")
    if len(content) > MAX_FILE_BYTES:
        raise ImageError(f"{name} is over {MAX_FILE_BYTES >> 20} MiB, the limit for a file; save it smaller")
    return name, content


def _read_file(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        # without O_NONBLOCK a FIFO would wait here for its writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise ImageError(f"{name} does not exist; check the path") from error
    except PermissionError as error:
        raise ImageError(f"{name} may not be read by this user; change its permissions") from error
    except (OSError, ValueError) as error:
        raise ImageError(f"{name} cannot be opened ({getattr(error, 'strerror', error)}); check the path") from error
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        found = "a directory" if stat.S_ISDIR(kind) else "a device or pipe"
        raise ImageError(f"{name} is {found}, not a file; give an image file, or its bytes as a stream")
    with open(handle, "rb") as file:
        return _read_stream(name, file)


def _read_stream(name: str, stream: BinaryIO) -> bytes:
    content = bytearray()
    try:
        while len(content) <= MAX_FILE_BYTES and (piece := stream.read(MAX_FILE_BYTES + 1 - len(content))):
            content += piece
    except MemoryError as error:
        raise ImageError(f"no memory left to read {name}; give a smaller file, or free memory") from error
    except (OSError, ValueError, TypeError) as error:
        raise ImageError(f"{name} cannot be read ({error}); give a readable binary stream") from error
    return bytes(content)


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()  # before EXIF: TIFF turns itself upright while loading
    turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
    image = _rgb(image)
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    flat = Image.new("RGB", image.size)
    rows = max(1, BAND_PIXELS // image.width)  # in bands: compositing takes three copies
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", band.size, "white")
        flat.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return flat


def _squared(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    side = max(image.size)
    if side**2 > MAX_PIXELS:
        raise ImageError(
            f"the image is {image.width}x{image.height} pixels, padded to a square it would be {side}x{side}; "
            f"the limit is {MAX_PIXELS:,} in all; shrink its longer side to {math.isqrt(MAX_PIXELS)}"
        )
    square = Image.new("RGB", (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _resized_size(width: int, height: int, resize: int | tuple[int, int] | None) -> tuple[int, int]:
    """(width, height) after `resize`."""
    if resize is None:
        return width, height
    if isinstance(resize, tuple):
        return resize[1], resize[0]
    long = int(resize * max(width, height) / min(width, height))
    return (resize, long) if width <= height else (long, resize)


def _resized_crop(image: Image.Image, settings: ImageSettings) -> Image.Image | NDArray[np.uint8]:
    """RGB [height, width]; where the crop is larger than the picture, black stands around it."""
    width, height = _resized_size(*image.size, settings.resize)
    left, top = (width - settings.width) // 2, (height - settings.height) // 2
    if settings.resize is None or width * height <= MAX_RESIZED_PIXELS:
        resized = (
            image
            if settings.resize is None
            else image.resize((width, height), Image.Resampling[settings.resample.upper()])
        )
        return resized.crop((left, top, left + settings.width, top + settings.height))
    if settings.resample not in _KERNELS:
        raise ImageError(
            f"the image is {image.width}x{image.height} pixels, resized it would be {width}x{height}; "
            f"with {settings.resample} the limit is {MAX_RESIZED_PIXELS:,} in all; cut off some of its longer side"
        )
    columns = _enlarged(np.asarray(image).swapaxes(0, 1), width, left, settings.width, settings.resample)
    return _enlarged(columns.swapaxes(0, 1), height, top, settings.height, settings.resample)


def _enlarged(pixels: NDArray[np.uint8], size: int, start: int, count: int, resample: str) -> NDArray[np.uint8]:
    """`count` rows from row `start` of `pixels` [rows, ...] enlarged to `size` rows, black outside of them.

    The same numbers as Pillow's pass over one axis, which has weights of 22 fractional bits.
    """
    reach, kernel = _KERNELS[resample]
    out = np.zeros((count, *pixels.shape[1:]), np.uint8)
    for row in range(max(0, -start), min(count, size - start)):
        center = (start + row + 0.5) * (len(pixels) / size)
        low, high = max(int(center - reach + 0.5), 0), min(int(center + reach + 0.5), len(pixels))
        weights = kernel(np.arange(low, high, dtype=np.float64) - center + 0.5)
        fixed = weights / weights.sum() * (1 << 22)
        fixed = (fixed + np.copysign(0.5, fixed)).astype(np.int64)  # halves go away from zero
        total = np.tensordot(fixed, pixels[low:high].astype(np.int64), 1)
        out[row] = np.clip((total + (1 << 21)) >> 22, 0, 255)
    return out


def _normalised_bytes(settings: ImageSettings) -> NDArray[np.float32]:
    """What each value of a byte becomes, [3, 256]; rounded to float32 after each step, as HF does."""
    rescaled = (np.arange(256) * settings.rescale).astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, None] for values in (settings.mean, settings.std))
    return cast("NDArray[np.float32]", (rescaled - mean) / std)
