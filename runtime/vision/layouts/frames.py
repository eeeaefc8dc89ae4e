"""Some frames of a video, each one view of the same number of tokens: Video-LLaVA, SmolVLM and others.

The tokens follow frame by frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vtx.runtime.errors import BundleError
from vtx.runtime.strict import optional
from vtx.runtime.vision.bilinear import nearest, resized
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames
from vtx.runtime.vision.layout import VideoLayout
from vtx.runtime.vision.layouts.marked import FRAME, WHOLE, resized_size
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.runtime.vision.plan import ImagePlan, View
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage, of_frames

MAX_FRAME_TOKENS = 1 << 16
MAX_BETWEEN = 64  # characters
MAX_LONGER = 4096  # pixels
ONES = (
    "",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True, slots=True)
class Frames(VideoLayout):
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
        valid = 1 <= self.frames <= MAX_SAMPLED_FRAMES and 1 <= self.tokens <= MAX_FRAME_TOKENS
        if len(self.between) > MAX_BETWEEN:
            raise BundleError(
                f"layout 'frames' has {len(self.between)} characters between frames, the limit is {MAX_BETWEEN}; "
                "export the bundle again"
            )
        rate = 1 if self.a_second is None else self.a_second
        longer = 1 if self.longer is None else self.longer
        if not 0 < rate <= 1000 or not 1 <= longer <= MAX_LONGER:
            raise BundleError(
                f"layout 'frames' has {self.a_second} frames a second of {self.longer} pixels; it needs up to 1000 and "
                f"1 to {MAX_LONGER}; export the bundle again"
            )
        if not valid or (self.halved and math.isqrt(self.tokens) ** 2 != self.tokens):
            raise BundleError(
                f"layout 'frames' has {self.frames} frames of {self.tokens} tokens; it needs 1 to "
                f"{MAX_SAMPLED_FRAMES} frames, and a square of tokens if it is halved; export the bundle again"
            )

    @property
    def max_tokens(self) -> int:
        return self.count(self.frames)

    def count(self, frames: int) -> int:
        """Tokens of a video of `frames` frames."""
        return frames * (math.ceil(math.isqrt(self.tokens) / 2) ** 2 if self.halved else self.tokens) + self.newline

    @property
    def sampling(self) -> FrameSampling:
        timed = self.a_second is not None
        return FrameSampling(self.frames, self.a_second, rounded=True, padded=self.padded, without_ends=timed)

    def prompt_image(self, clip: SampledFrames, width: int, height: int) -> PromptImage:
        """A video in a prompt: its tokens, and the text between frames."""
        frames = len(clip.numbers)
        if self.a_second is not None:
            return PromptImage((self.count(1),) * frames, _timed(clip))
        if not self.between:
            return PromptImage((self.count(frames),))
        return PromptImage((self.count(1),) * frames, ("", *[self.between] * (frames - 1), ""))

    def frame(self, frames: int, width: int, height: int) -> ImagePlan:
        sizes = () if self.longer is None else (resized_size(width, height, self.longer),)
        return ImagePlan((View(self.tokens, sizes),))

    def arrange(
        self, views: Sequence[ImageTokens], clip: object, width: int, height: int, newline: HiddenStates, first: int = 0
    ) -> ImageTokens:
        frames = [*views]
        if self.halved:
            side = math.isqrt(self.tokens)
            half = math.ceil(side / 2)
            near = nearest(side, half)
            patch_numbers = (
                near[:, None] * side + near
            ).ravel()  # each token is a mean of four, at the nearest one's patch
            frames = []
            for number, view in enumerate(views):
                hidden = resized(view.hidden.reshape(side, side, -1), half, half).reshape(half**2, -1)
                frame_patches = view.patches.take(patch_numbers)  # of all the frame's patches
                frame_patches = replace(frame_patches, indices=frame_patches.indices + number * (self.tokens - half**2))
                frames.append(ImageTokens(hidden, frame_patches))
        return of_frames([*frames, ImageTokens.newlines(newline)] if self.newline else frames)


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
    minutes, rest = divmod(int(seconds), 60)
    return *divmod(minutes, 60), rest
