"""The sources of an image, and its bytes, read within `MAX_FILE_BYTES`."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import stat
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.files.container import check_size
from vtx.runtime.vision.limits import MAX_FILE_BYTES

_DATA_URL = re.compile(r"data:([a-z0-9.+/-]{0,80})((?:;[a-z0-9=_.-]{1,80}){0,4}),", re.IGNORECASE | re.ASCII)
_BREAKS = dict.fromkeys(map(ord, "\r\n\t "))  # MIME breaks base64 into lines of 76 characters
_URL = re.compile(r"([a-z][a-z0-9+.-]{1,20})://", re.IGNORECASE | re.ASCII)
_ARRAYS = {1: ("L", "L"), 3: ("RGB", "BGR"), 4: ("RGBA", "BGRA")}  # modes by channels, and those of `bgr`
_FORMS = "give a path, bytes, a data URL, a binary stream, a PIL image or a uint8 array"


@dataclass(frozen=True, slots=True, eq=False)
class BGR:
    """An array [height, width, 3 or 4] uint8 whose colours are blue, green, red, as OpenCV gives them."""

    array: NDArray[np.uint8]


def bgr(array: NDArray[np.uint8]) -> BGR:
    """Mark an array [height, width, 3 or 4] as BGR, OpenCV's order: `model.open(vtx.bgr(frame))`."""
    return BGR(array)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The content of an image file, and its name for messages."""

    name: str
    content: bytes


ImageSource: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image.Image | NDArray[np.uint8] | BGR |"
    "ImageFile"
)


def from_array(source: NDArray[np.uint8] | BGR) -> Image.Image:
    """A PIL image of an array [height, width] grey, [height, width, 3] RGB or [height, width, 4] RGBA, of uint8.

    Raises ImageError, with the expression that fixes it, for any other layout or dtype.

    Copies once, into Pillow's own layout, and swaps BGR on the way; a view that is not contiguous costs one more.
    """
    is_bgr = isinstance(source, BGR)
    array = source.array if isinstance(source, BGR) else source
    if not isinstance(array, np.ndarray):
        raise ImageError(f"vtx.bgr got a {type(array).__name__}; give it a numpy array [height, width, 3] of uint8")
    _check_array(array)
    shape = array.shape
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    channels = 1 if array.ndim == 2 else shape[2]
    if is_bgr and channels == 1:
        raise ImageError(f"vtx.bgr got grey of shape {array.shape}; give the array itself")
    height, width = shape[:2]
    check_size("the array", width, height)
    mode, swapped = _ARRAYS[channels]
    data = np.ascontiguousarray(array)
    return Image.frombuffer(mode, (width, height), data, "raw", swapped if is_bgr else mode, 0, 1)


def _check_array(array: NDArray[Any]) -> None:
    """Raise ImageError, with the expression that fixes it, for another layout or dtype."""
    shape = array.shape
    if array.ndim == 4:
        raise ImageError(f"the array {list(shape)} is a batch; give one image at a time: array[0]")
    if array.ndim == 3 and shape[2] not in _ARRAYS and shape[0] in _ARRAYS:
        raise ImageError(f"the array {list(shape)} has its channels first; give array.transpose(1, 2, 0)")
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in _ARRAYS):
        raise ImageError(f"the array {list(shape)} is not an image; give [height, width] or [height, width, 3], uint8")
    if array.dtype != np.uint8:
        fix = _FIXES.get(array.dtype.kind, "array.astype('uint8') if its values are from 0 to 255")
        raise ImageError(f"the array is {array.dtype}, the limit is uint8 of 0 to 255; give {fix}")


_FIXES = {  # by the kind of dtype
    "b": "array.astype('uint8') * 255",
    "f": "(array * 255).round().astype('uint8') if its values are from 0 to 1",
}


def is_file(source: Any) -> bool:
    """True for what `read_file` reads without changing it: a path, a data URL or bytes."""
    return isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview, ImageFile))


def read_file(source: Any) -> ImageFile:
    """The whole content of an image file, at most `MAX_FILE_BYTES`. Raises ImageError."""
    content: bytes | bytearray | memoryview
    if isinstance(source, ImageFile):
        return source
    if isinstance(source, str) and source[:5].lower() == "data:":
        name = "the image in the data URL"
        content = read_data_url(source, "image", MAX_FILE_BYTES)
    elif isinstance(source, str) and (scheme := _URL.match(source)):
        raise ImageError(f"vtx fetches no {scheme[1].lower()} URLs; give the file's path or its bytes")
    elif isinstance(source, (bytes, bytearray, memoryview)):
        name = "the given image"
        content = source
    elif isinstance(source, (str, os.PathLike)):
        name = f"image {_shortened(repr(os.fspath(source)))}"
        with open_file(name, source) as file:
            content = _read_stream(name, file)
    elif callable(getattr(source, "read", None)):
        name = "the image from the stream"
        content = _read_stream(name, source)
    else:
        raise ImageError(f"an object of type {type(source).__name__} is not an image; {_FORMS}{_conversion(source)}")
    size = content.nbytes if isinstance(content, memoryview) else len(content)
    if not size:
        raise ImageError(f"{name} is empty (0 bytes); save or copy it again")
    if size > MAX_FILE_BYTES:
        raise ImageError(f"{name} is over {MAX_FILE_BYTES >> 20} MiB, the limit for a file; save it smaller")
    return ImageFile(name, content if isinstance(content, bytes) else bytes(content))


def _shortened(path: str) -> str:
    """A path for messages, of at most 200 characters."""
    return path if len(path) <= 200 else f"{path[:120]}...{path[-60:]}"


def _conversion(source: Any) -> str:
    """The end of a message about an object that is no image: the expression that makes one of it, if one does."""
    if hasattr(source, "detach"):
        return "; of a tensor [channels, height, width] give tensor.permute(1, 2, 0).cpu().numpy()"
    return "; numpy.asarray makes one" if hasattr(source, "__array__") or isinstance(source, list) else ""


def read_data_url(url: str, wanted: str, limit: int) -> bytes:
    """The bytes in a data URL of an "image" or "video", as `wanted`, at most `limit`. Raises ImageError."""
    header = _DATA_URL.match(url[:600])
    if header is None or not header[2].lower().endswith(";base64"):
        raise ImageError(f"the data URL does not start with data:{wanted}/...;base64, as {wanted}s do; encode it so")
    kind = header[1].lower()
    if kind and not kind.startswith(f"{wanted}/"):
        article = "an" if wanted == "image" else "a"
        raise ImageError(f"the data URL holds {kind}, not {article} {wanted}; give data:{wanted}/...;base64,")
    content = url[header.end() :].translate(_BREAKS)
    if len(content) > -(-limit // 3) * 4:
        raise ImageError(f"the {wanted} in the data URL is over {limit >> 20} MiB, the limit; save it smaller")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URL is not valid base64 ({error}); encode the file again") from error


def open_file(name: str, path: str | os.PathLike[str]) -> BinaryIO:
    """The regular file at `path`, open for reading; messages call it `name`. Raises ImageError."""
    try:
        # without O_NONBLOCK a FIFO would wait here for its writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise ImageError(f"{name} does not exist; check the path") from error
    except PermissionError as error:
        raise ImageError(f"{name} may not be read by this user; change its permissions") from error
    except (OSError, ValueError) as error:
        raise ImageError(f"{name} cannot be opened ({getattr(error, 'strerror', error)}); check the path") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "a directory" if stat.S_ISDIR(mode) else "a device or pipe"
        raise ImageError(f"{name} is {kind}, not a file; give an image file, or its bytes as a stream")
    return open(handle, "rb")


def _read_stream(name: str, stream: BinaryIO) -> bytes:
    content = bytearray()
    try:
        while len(content) <= MAX_FILE_BYTES and (piece := stream.read(MAX_FILE_BYTES + 1 - len(content))):
            content += piece
    except MemoryError as error:
        raise ImageError(f"no memory left to read {name}; give a smaller file, or free memory") from error
    except (OSError, ValueError, TypeError) as error:
        fix = "give a readable binary stream" if error.args[:1] != (errno.EIO,) else "check the disk"
        raise ImageError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error}); {fix}") from error
    return bytes(content)
