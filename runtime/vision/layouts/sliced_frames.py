"""Frames of a video, each as an image in slices: MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vtx.runtime.errors import BundleError
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames
from vtx.runtime.vision.layout import VideoLayout
from vtx.runtime.vision.layouts.slices import Slices
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.runtime.vision.plan import ImagePlan
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage, of_frames


@dataclass(frozen=True, slots=True)
class SlicedFrames(VideoLayout):
    """The frame at each full second of a video, at most `frames` of them, each with the views and text of `slices`.

    Frames follow each other without text between them but the marks of their views. A video has a number before it if
    the slices are `numbered`, and videos are counted by themselves.
    """

    slices: Slices
    frames: int

    def __post_init__(self) -> None:
        if not 1 <= self.frames <= MAX_SAMPLED_FRAMES:
            raise BundleError(
                f"layout 'sliced_frames' has {self.frames} frames; it needs 1 to {MAX_SAMPLED_FRAMES}; export the "
                "bundle again"
            )

    @property
    def max_tokens(self) -> int:
        """The bound for a video of `frames` frames."""
        return self.frames * self.slices.max_tokens

    @property
    def max_views(self) -> int:
        return self.slices.max_views

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(self.frames, 1.0, by_second=True)

    def within(self, max_pixels: int) -> SlicedFrames:
        return replace(self, slices=self.slices.within(max_pixels))

    def limited(self, max_views: int) -> SlicedFrames:
        return replace(self, slices=self.slices.limited(max_views))

    def prompt_image(self, clip: SampledFrames, width: int, height: int) -> PromptImage:
        """A video in a prompt: the tokens of each view, and the marks around them."""
        frame = self.slices.prompt_image(width, height)
        count = len(clip.numbers)
        first, *between, last = frame.texts
        texts = (first, *(*between, last + first) * (count - 1), *between, last)
        return replace(frame, spans=frame.spans * count, texts=texts)

    def frame(self, frames: int, width: int, height: int) -> ImagePlan:
        return self.slices.plan(width, height)

    def arrange(
        self, views: Sequence[ImageTokens], clip: object, width: int, height: int, newline: HiddenStates, first: int = 0
    ) -> ImageTokens:
        """The tokens of a video from those of its frames' views; `newline` is not used."""
        return of_frames(views, self.slices.passes(width, height))
