"""Preprocessing of pictures, as stated in the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.errors import BundleError
from vtx.runtime.strict import optional

MAX_INPUT_SIDE = 2_048  # of what a vision tower takes
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's filters, by Pillow's numbers


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The preprocessing of a picture to [3, height, width]: pad, resize, crop, `(value * rescale - mean) / std`.

    `pad` is the RGB background of a square around the picture, or None; `resize` the shortest edge, or (height, width),
    or None; `crop` the centre's (height, width), or None. With none of the three the image layout resizes pictures, and
    each has its own size. `within`: pictures keep their shape within `resize`, at the top left; the rest is 0.
    `centred`: in the middle of black instead; `ended`: at its bottom right; `interpolated`: resized as PyTorch does it,
    without antialiasing. Raises BundleError.
    """

    pad: tuple[int, int, int] | None
    resize: int | tuple[int, int] | None
    resample: str
    crop: tuple[int, int] | None
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    within: bool = optional(False)
    centred: bool = optional(False)
    ended: bool = optional(False)
    interpolated: bool = optional(False)

    def __post_init__(self) -> None:
        edge = (self.resize,) if isinstance(self.resize, int) else self.resize
        fixed = self.crop or isinstance(self.resize, tuple) or (self.pad and self.resize) or self.own_size
        edges = 1 if isinstance(self.resize, int) else 2
        sizes = f"from 1 to {MAX_INPUT_SIDE}"
        checks = (
            ("pad", _within(self.pad, 3, 0, 255, whole=True), "3 bytes or null"),
            (
                "resize",
                _within(edge, edges, 1, MAX_INPUT_SIDE, whole=True),
                f"an edge or [height, width] {sizes}, or null",
            ),
            ("crop", _within(self.crop, 2, 1, MAX_INPUT_SIDE, whole=True), f"[height, width] {sizes}, or null"),
            ("resample", self.resample in RESAMPLING, "one of " + ", ".join(RESAMPLING)),
            ("rescale", _within((self.rescale,), 1, 1e-6, 1e6), "a number from 1e-6 to 1e6"),
            ("mean", _within(self.mean, 3, -1e6, 1e6), "3 numbers from -1e6 to 1e6"),
            ("std", _within(self.std, 3, 1e-6, 1e6), "3 numbers from 1e-6 to 1e6"),
            ("crop", bool(fixed), "set unless resize alone fixes height and width"),
            ("within", not self.within or (isinstance(self.resize, tuple) and not self.pad and not self.crop), "false"),
        )
        for key, fits, requirement in checks:
            if not fits:
                raise BundleError(f"image setting {key} is {repr(getattr(self, key))[:80]}; it must be {requirement}")

    @property
    def own_size(self) -> bool:
        """True if every picture has its own size, which the image layout decides."""
        return self.pad is None and self.resize is None and self.crop is None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Height and width; None if every picture has its own."""
        return (None, None) if self.own_size else self.size

    @property
    def size(self) -> tuple[int, int]:
        """Height and width; only if pictures do not have their own."""
        edge = self.crop or self.resize
        assert edge is not None, "every picture has a size of its own"
        return (edge, edge) if isinstance(edge, int) else edge


def _within(values: object, count: int, low: float, high: float, *, whole: bool = False) -> bool:
    """Return True if `values`, which may come from a checkpoint as anything, are None or numbers from `low` on."""
    kinds = (int,) if whole else (int, float)
    if values is None or not isinstance(values, tuple):
        return values is None
    return len(values) == count and all(type(value) in kinds and low <= value <= high for value in values)
