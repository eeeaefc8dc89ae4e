"""How pictures are preprocessed; stands in the bundle's manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from vtx.runtime.errors import BundleError

MAX_INPUT_SIDE = 2_048  # of what a vision tower takes
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's filters, by Pillow's numbers


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How one picture becomes [3, height, width]: pad, resize, crop, then `(value * rescale - mean) / std`.

    `pad` is the RGB background of a square around the picture, or None; `resize` the shortest edge, or
    (height, width), or None; `crop` the centre's (height, width), or None. With none of the three the image layout
    resizes pictures, which keep a size of their own. Raises BundleError for values that are not settings, or that
    give pictures of several sizes otherwise.
    """

    pad: tuple[int, int, int] | None
    resize: int | tuple[int, int] | None
    resample: str
    crop: tuple[int, int] | None
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        _check("pad", self.pad, self.pad is None or _numbers(self.pad, 3, 0, 255, whole=True), "3 bytes or null")
        edge = (self.resize,) if isinstance(self.resize, int) else self.resize
        count = 1 if isinstance(self.resize, int) else 2
        sizes = f"from 1 to {MAX_INPUT_SIDE}"
        fits = edge is None or _numbers(edge, count, 1, MAX_INPUT_SIDE, whole=True)
        _check("resize", self.resize, fits, f"an edge or [height, width] {sizes}, or null")
        fits = self.crop is None or _numbers(self.crop, 2, 1, MAX_INPUT_SIDE, whole=True)
        _check("crop", self.crop, fits, f"[height, width] {sizes}, or null")
        known = isinstance(self.resample, str) and self.resample in RESAMPLING
        _check("resample", self.resample, known, "one of " + ", ".join(RESAMPLING))
        _check("rescale", self.rescale, _numbers((self.rescale,), 1, 1e-6, 1e6), "a number from 1e-6 to 1e6")
        _check("mean", self.mean, _numbers(self.mean, 3, -1e6, 1e6), "3 numbers from -1e6 to 1e6")
        _check("std", self.std, _numbers(self.std, 3, 1e-6, 1e6), "3 numbers from 1e-6 to 1e6")
        one_size = self.crop or isinstance(self.resize, tuple) or (self.pad and self.resize) or self.own_size
        _check("crop", self.crop, bool(one_size), "set where resize alone does not fix height and width")

    @property
    def own_size(self) -> bool:
        """Whether pictures keep a size of their own, which the image layout decides; there is no other then."""
        return self.pad is None and self.resize is None and self.crop is None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Height and width, None where every picture has its own."""
        return (None, None) if self.own_size else (self.height, self.width)

    @property
    def height(self) -> int:
        return self._output[0]

    @property
    def width(self) -> int:
        return self._output[1]

    @property
    def _output(self) -> tuple[int, int]:
        assert not self.own_size, "every picture has a size of its own"
        edge = self.crop or self.resize
        return edge if isinstance(edge, tuple) else (cast(int, edge), cast(int, edge))


def _numbers(values: Any, count: int, low: float, high: float, *, whole: bool = False) -> bool:
    kinds = (int,) if whole else (int, float)
    if not isinstance(values, tuple) or len(values) != count:
        return False
    return all(isinstance(v, kinds) and not isinstance(v, bool) and low <= v <= high for v in values)


def _check(key: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise BundleError(f"image setting {key} is {repr(value)[:80]}; it must be {wanted}")
