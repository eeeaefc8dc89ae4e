"""Frames of a video, each as an image in slices: MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames
from vtx.runtime.vision.layout import VideoLayout
from vtx.runtime.vision.layouts.slices import Slices
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage, joined


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

    def views(self, frame: Image.Image, settings: ImageSettings, frames: int) -> list[NDArray[np.float32]]:
        """One of `frames` frames as the tower's inputs, [3, height, width] float32: the whole, then its slices."""
        return [*self.slices.views(frame, settings)]

    def arrange(
        self, views: Sequence[ImageTokens], clip: object, width: int, height: int, newline: HiddenStates, first: int = 0
    ) -> ImageTokens:
        """The tokens of a video from those of its frames' views; `newline` is not used."""
        tokens = joined(views)
        per_frame = self.slices.count(width, height)
        frames = np.arange(len(tokens)) // per_frame  # which compete with each other, unlike the views of an image
        return replace(tokens, patches=replace(tokens.patches, views=None, frames=frames))
