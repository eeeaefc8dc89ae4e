"""Some frames of a video, each one view of the same number of tokens: Video-LLaVA, SmolVLM and others.

The tokens follow frame by frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import optional
from vtx.runtime.vision.bilinear import nearest, resized
from vtx.runtime.vision.layouts.marked import FRAME, WHOLE, resized_size
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.runtime.vision.preprocess import preprocess
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage, joined
from vtx.runtime.vision.video_child import chosen

if TYPE_CHECKING:
    from vtx.runtime.vision.video import Rate, SampledFrames

MAX_FRAME_TOKENS = 1 << 16
MAX_BETWEEN = 64  # characters
MAX_LONGER = 4096  # pixels
ONES = (
    "", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True, slots=True)
class Frames:
    """`frames` of a video unless more or fewer are asked for, and `tokens` of each as its graph gives them.

    `halved`: these form a square, which is shrunk bilinearly to half its side, rounded up. `newline`: one learned
    newline ends the video. `between`: text of the prompt between two frames. `padded`: frames are sampled up to the one
    before the last, and a video with fewer begins with black ones.
    `a_second`: frames are sampled at this rate, at most `frames`, without the first and the last second of a long
    video, and the prompt tells their number, the duration and the time of each, as SmolVLM's does. `longer`: frames are
    resized to this many pixels along their longer side before they are resized to the tower's size.
    """

    frames: int
    tokens: int
    halved: bool = optional(False)
    newline: bool = optional(False)
    between: str = optional("")
    padded: bool = optional(False)
    a_second: float | None = optional(None)
    longer: int | None = optional(None)

    def __post_init__(self) -> None:
        sound = 1 <= self.frames <= MAX_SAMPLED_FRAMES and 1 <= self.tokens <= MAX_FRAME_TOKENS
        if len(self.between) > MAX_BETWEEN:
            raise BundleError(
                f"layout 'frames' has {len(self.between)} characters between frames, the limit is {MAX_BETWEEN}; "
                "export the bundle again"
            )
        rate, longer = 1 if self.a_second is None else self.a_second, 1 if self.longer is None else self.longer
        if not 0 < rate <= 1000 or not 1 <= longer <= MAX_LONGER:
            raise BundleError(
                f"layout 'frames' has {self.a_second} frames a second of {self.longer} pixels; it needs up to 1000 and "
                f"1 to {MAX_LONGER}; export the bundle again"
            )
        if not sound or (self.halved and math.isqrt(self.tokens) ** 2 != self.tokens):
            raise BundleError(
                f"layout 'frames' has {self.frames} frames of {self.tokens} tokens; it needs 1 to "
                f"{MAX_SAMPLED_FRAMES} frames, and a square of tokens if it is halved; export the bundle again"
            )

    @property
    def max_tokens(self) -> int:
        """Tokens of a video of the usual number of frames."""
        return self.count(self.frames)

    def count(self, frames: int) -> int:
        """Tokens of a video of `frames` frames."""
        return frames * (math.ceil(math.isqrt(self.tokens) / 2) ** 2 if self.halved else self.tokens) + self.newline

    @property
    def rate(self) -> int | Rate:
        """The number of frames that are sampled."""
        from vtx.runtime.vision.video import Rate

        return self.frames if self.a_second is None else Rate(self.a_second, 1, self.frames, nearest=True)

    @property
    def without_ends(self) -> float | None:
        """Frames a second, if a second is left out at both ends of a long video."""
        return self.a_second

    @property
    def nearest(self) -> bool:
        """True if the places of sampled frames are rounded to the nearest frame."""
        return False

    @property
    def max_views(self) -> int:
        """Views of a frame, or of a part of one."""
        return 1

    @property
    def by_second(self) -> bool:
        """True if frames are those at full seconds, and not sampled evenly."""
        return False

    @property
    def together(self) -> int | None:
        """Frames of a view, if it is not one alone."""
        return None

    def limited(self, max_views: int) -> Frames:
        """The layout itself: frames have no slices."""
        return self

    def within(self, max_pixels: int) -> Frames:
        """The layout itself: frames are resized to the tower's size."""
        return self

    def sampled(self, clip: SampledFrames, frames: int) -> SampledFrames:
        """The clip with `frames` frames instead."""
        form = {"padded": self.padded, "nearest": self.nearest}
        places = chosen(clip.count, clip.rate, frames, None, without_ends=self.without_ends, **form)
        return replace(clip, numbers=tuple(places))

    def prompt_image(self, clip: SampledFrames, width: int = 0, height: int = 0) -> PromptImage:
        """A video in a prompt: its tokens, and the text between frames."""
        frames = len(clip.numbers)
        if self.a_second is not None:
            return PromptImage((self.count(1),) * frames, _timed(clip))
        if not self.between:
            return PromptImage((self.count(frames),))
        return PromptImage((self.count(1),) * frames, ("", *[self.between] * (frames - 1), ""))

    def views(self, frame: Image.Image, settings: ImageSettings, frames: int) -> list[NDArray[np.float32]]:
        """One of `frames` frames as the tower's inputs, [3, height, width] float32: one."""
        if self.longer is not None:
            frame = frame.resize(resized_size(*frame.size, self.longer), Image.Resampling[settings.resample.upper()])
        return [preprocess(frame, settings)]

    def arrange(
        self, views: Sequence[ImageTokens], clip: object, width: int, height: int, newline: HiddenStates, first: int = 0
    ) -> ImageTokens:
        """The tokens of a video from those of its frames; `newline` [1, hidden], [0, hidden] if none."""
        frames = [*views]
        if self.halved:
            side = math.isqrt(self.tokens)
            half = math.ceil(side / 2)
            near = nearest(side, half)
            shown = (near[:, None] * side + near).ravel()  # each token is a mean of four, at the nearest one's patch
            frames = []
            for number, view in enumerate(views):
                hidden = resized(view.hidden.reshape(side, side, -1), half, half).reshape(half**2, -1)
                own = view.patches.take(shown)  # of all the frame's patches
                own = replace(own, indices=own.indices + number * (self.tokens - half**2))
                frames.append(ImageTokens(hidden, own))
        tokens = joined([*frames, ImageTokens.newlines(newline)] if self.newline else frames)
        patches = tokens.patches  # frames compete with each other, unlike the views of an image
        return replace(tokens, patches=replace(patches, views=None, frames=patches.views))


def in_words(number: int) -> str:
    """A number from 1 to 999 in English words."""
    hundreds, rest = divmod(number, 100)
    words = ONES[rest] if rest < len(ONES) else "-".join(filter(None, (TENS[rest // 10], ONES[rest % 10])))
    return " and ".join(filter(None, (f"{ONES[hundreds]} hundred" if hundreds else "", words)))


def _timed(clip: SampledFrames) -> tuple[str, ...]:
    """The text before, between and after the frames of a video, as SmolVLM's processor prints it."""
    hours, minutes, seconds = _clock(clip.count / clip.rate)
    intro = (
        f"You are provided the following series of {in_words(len(clip.numbers))} frames from a "
        f"{hours}:{minutes:02d}:{seconds:02d} [H:MM:SS] video.\n"
    )
    before = list[str]()
    for number in clip.numbers:
        hours, minutes, seconds = _clock(number / clip.rate)
        before.append(f"\nFrame from {60 * hours + minutes:02d}:{seconds:02d}:{FRAME}{WHOLE}")
    return (intro + before[0], *(FRAME + text for text in before[1:]), f"{FRAME}\n\n")


def _clock(seconds: float) -> tuple[int, int, int]:
    """Hours, minutes and seconds of a time, rounded down."""
    minutes, left = divmod(int(seconds), 60)
    return *divmod(minutes, 60), left
