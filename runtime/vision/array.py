"""Arrays as pictures: [height, width] grey, [height, width, 3] RGB, [height, width, 4] RGBA, of uint8."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.files.container import check_size
from vtx.runtime.vision.files.source import BGR

_RAW = {1: ("L", "L"), 3: ("RGB", "BGR"), 4: ("RGBA", "BGRA")}


def from_array(source: NDArray[np.uint8] | BGR) -> Image.Image:
    """A PIL image of the array; ImageError, with the expression that fixes it, for any other layout or dtype.

    Copies once, into Pillow's own layout, and swaps BGR on the way; a view that is not contiguous costs one more.
    """
    is_bgr = isinstance(source, BGR)
    array = source.array if isinstance(source, BGR) else source
    if not isinstance(array, np.ndarray):
        raise ImageError(f"vtx.bgr got a {type(array).__name__}; give it a numpy array [height, width, 3] of uint8")
    shape, kind = array.shape, array.dtype.kind
    if array.ndim == 4:
        raise ImageError(f"the array {list(shape)} is a batch; give one image at a time: array[0]")
    if array.ndim == 3 and shape[2] not in _RAW and shape[0] in _RAW:
        raise ImageError(f"the array {list(shape)} has its channels first; give array.transpose(1, 2, 0)")
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in _RAW):
        raise ImageError(f"the array {list(shape)} is not an image; give [height, width] or [height, width, 3], uint8")
    if array.dtype != np.uint8:
        fix = "array.astype('uint8') * 255" if kind == "b" else "array.astype('uint8') if its values are from 0 to 255"
        fix = "(array * 255).round().astype('uint8') if its values are from 0 to 1" if kind == "f" else fix
        raise ImageError(f"the array is {array.dtype}, the limit is uint8 of 0 to 255; give {fix}")
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    channels = 1 if array.ndim == 2 else shape[2]
    if is_bgr and channels == 1:
        raise ImageError(f"vtx.bgr got grey of shape {array.shape}; give the array itself")
    height, width = shape[:2]
    check_size("the array", width, height)
    mode, swapped = _RAW[channels]
    data = np.ascontiguousarray(array)
    return Image.frombuffer(mode, (width, height), data, "raw", swapped if is_bgr else mode, 0, 1)
