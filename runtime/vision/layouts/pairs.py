"""Frames of a video in pairs, each one pass of the tower at native resolution: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

A patch covers a square of both frames. Each token has a time, a row and a column as position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import BundleError, ImageError
from vtx.runtime.strict import optional
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames
from vtx.runtime.vision.layout import VideoLayout
from vtx.runtime.vision.layouts.native import Native, PixelBounds, check_ratio, enlarged
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS, MAX_SAMPLED_FRAMES
from vtx.runtime.vision.plan import ImagePlan, Size, own_shape, squares
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage, of_frames

TOGETHER = 2  # frames in a patch


@dataclass(frozen=True, slots=True)
class Pairs(VideoLayout):
    """Tokens are squares of `merge` x `merge` patches of `patch` pixels a side, in two frames each.

    `a_second` frames are sampled a second, at least `fewest` and at most `frames`; of an odd number the last counts
    twice. Frames are resized to whole squares, between `min_pixels` and `max_pixels` each, or with `of_clip` all of
    them together, but to at most `frame_pixels` each. `capped`: the most tokens of a frame, or, without
    `of_clip`, of which 90% are the most of all frames. `times`: the prompt tells the time of each pair before it, and
    positions begin anew with each; with `flat` they are single numbers. Else all pairs follow each other, `ticks`
    positions a second apart in time, or one.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    frames: int
    a_second: float
    fewest: int
    of_clip: bool = optional(False)
    times: bool = optional(False)
    flat: bool = optional(False)
    ticks: float | None = optional(None)
    frame_pixels: int | None = optional(None)
    capped: int | None = optional(None)

    def __post_init__(self) -> None:
        most = MAX_RESIZED_PIXELS * (MAX_SAMPLED_FRAMES if self.of_clip else 1)
        valid = min(self.patch, self.merge, self.min_pixels) >= 1 and self.min_pixels <= self.max_pixels <= most
        valid = valid and self.unit**2 <= min(self.max_pixels, self.frame_pixels or self.max_pixels)
        valid_frames = 1 <= self.fewest <= self.frames <= MAX_SAMPLED_FRAMES and 0 < self.a_second <= 1000
        valid = valid and (self.capped is None or 1 <= self.capped <= 1 << 24)
        valid = valid and (self.times or not self.flat)
        if not valid or not valid_frames or (self.ticks is not None and (self.times or not 0 < self.ticks <= 1000)):
            raise BundleError(
                f"layout 'pairs' has {self.fewest} to {self.frames} frames, {self.a_second} a second, of "
                f"{self.min_pixels} to {self.max_pixels} pixels in tokens of {self.unit} x {self.unit}; it needs 1 to "
                f"{MAX_SAMPLED_FRAMES} frames, and at least one token and at most {most:,} pixels; "
                "export the bundle again"
            )

    @property
    def together(self) -> int:
        return TOGETHER

    @property
    def unit(self) -> int:
        """Pixels a side of one token's square."""
        return self.patch * self.merge

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(self.frames, self.a_second, self.fewest, nearest=True)

    @property
    def max_tokens(self) -> int:
        """The bound for a video of `frames` frames."""
        share = self.frames if self.of_clip else 1
        most = min(max(self.unit**2, self.max_pixels // share), MAX_RESIZED_PIXELS)
        frame = Native(self.patch, self.merge, min(-(-self.min_pixels // share), most), most)
        return _pairs(self.frames) * frame.max_tokens

    def within(self, max_pixels: int) -> Pairs:
        return replace(self, frame_pixels=min(max_pixels, self.frame_pixels or max_pixels))

    def prompt_image(self, clip: SampledFrames, width: int, height: int) -> PromptImage:
        """A video in a prompt: its tokens, and the time of each pair."""
        columns, rows = self._grid(len(clip.numbers), width, height)
        count = _pairs(len(clip.numbers))
        if not self.times:
            return PromptImage((count * columns * rows,), span=self._span(clip, columns, rows))
        seconds = [number / clip.rate for number in (*clip.numbers, clip.numbers[-1])]
        pairs = zip(seconds[::2], seconds[1::2], strict=False)
        end = "<|vision_end|>"
        before = [f"<{(first + last) / 2:.1f} seconds><|vision_start|>" for first, last in pairs]
        return PromptImage((columns * rows,) * count, (before[0], *(end + text for text in before[1:]), end))

    def frame(self, frames: int, width: int, height: int) -> ImagePlan:
        return ImagePlan((own_shape(*self._grid(frames, width, height), self.unit),))

    def arrange(
        self,
        views: Sequence[ImageTokens],
        clip: SampledFrames,
        width: int,
        height: int,
        newline: HiddenStates,
        first: int = 0,
    ) -> ImageTokens:
        """The tokens of a video from those of its pairs, from number `first` on, row by row; `newline` is not used."""
        columns, rows = self._grid(len(clip.numbers), width, height)
        count = columns * rows
        tokens = of_frames(views)
        runs = (count,) * len(views) if self.times else ()
        if self.flat:
            places = np.tile(np.arange(count, dtype=np.int64), len(views))
            return replace(tokens, offsets=places, span=count, runs=runs)
        offsets = np.tile(squares(columns, rows), (len(views), 1))
        if self.times:
            return replace(tokens, offsets=offsets, span=max(columns, rows), runs=runs)
        offsets[:, 0] = self._ticks(clip)[first : first + len(views)].repeat(count)
        return replace(tokens, offsets=offsets, span=self._span(clip, columns, rows))

    def _ticks(self, clip: SampledFrames) -> NDArray[np.int64]:
        """The position in time of each pair, from 0."""
        share = 1.0
        if self.ticks is not None:  # seconds of two of the sampled frames; transformers multiplies in float32
            share = self.ticks * (TOGETHER / (len(clip.numbers) / clip.count * clip.rate))
        numbers = np.arange(_pairs(len(clip.numbers)), dtype=np.float32) * np.float32(share)
        return numbers.astype(np.int64)

    def _span(self, clip: SampledFrames, columns: int, rows: int) -> int:
        return max(columns, rows, int(self._ticks(clip)[-1]) + 1)

    def _grid(self, frames: int, width: int, height: int) -> Size:
        """Columns and rows of tokens of each of `frames` frames of this size."""
        least = self.min_pixels * frames
        most = self.max_pixels * frames
        count = frames
        check_ratio(width, height)
        if self.of_clip:
            least = self.min_pixels
            most = self.max_pixels
            count = TOGETHER * max(1, round(frames / TOGETHER))
            width, height = enlarged(width, height, self.unit)
        if self.capped is not None:
            share = self.capped * self.unit**2
            floor = int(self.min_pixels * 1.05)
            if self.of_clip:
                share = min(share, self.max_pixels // frames)
            else:
                share = min(self.max_pixels, int(share * 0.9) * TOGETHER // frames)
            most = max(share, floor) * frames
        rounded = round(width / self.unit), round(height / self.unit)
        columns, rows = PixelBounds(self.unit, least, most).grid(width, height, rounded, frames, count)
        if self.frame_pixels is not None:
            columns, rows = PixelBounds(self.unit, 0, self.frame_pixels).grid(width, height, (columns, rows))
        if columns * rows * self.unit**2 > MAX_RESIZED_PIXELS:
            raise ImageError(
                f"frames of {width}x{height} pixels are resized to {columns * self.unit}x{rows * self.unit}; the limit "
                f"is {MAX_RESIZED_PIXELS:,} pixels; use more frames, or max_pixels (--max-pixels)"
            )
        return columns, rows


def _pairs(frames: int) -> int:
    return -(-frames // TOGETHER)
