"""Methods that choose tokens from the frames of a video, window by window, so that long videos need little memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import numpy as np

from vtx.runtime.policies.base import Entry, PromptText, Reduction
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens

Choose: TypeAlias = Callable[[HiddenStates], Ids]


class Clip(Reduction, Entry, ABC):
    """A method that looks at the frames of a video, `at_once` of them together, and leaves images whole.

    `begin` starts on a video of that many frames: what it returns gets the tokens [frames, n, width] of window after
    window, and returns the numbers, rising, of those tokens so far that stay. A later window may make earlier ones go.
    """

    __slots__ = ()
    of_videos: ClassVar[bool] = True

    @property
    @abstractmethod
    def at_once(self) -> int:
        """Frames of a window; 0: all of the video."""

    @abstractmethod
    def begin(self, frames: int) -> Choose: ...

    def entry(self) -> Entry | None:
        return self

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        if (frames := image.patches.of_frames()) is None:
            return None
        choose = self.begin(len(frames))
        indices = np.empty(0, np.int64)
        window = self.at_once or len(frames)
        for first in range(0, len(frames), window):
            indices = choose(image.hidden[frames[first : first + window]])
        stays = np.ones(len(image), bool)  # also a newline behind the frames
        stays[frames] = False
        stays[frames.ravel()[indices]] = True
        return np.flatnonzero(stays)
