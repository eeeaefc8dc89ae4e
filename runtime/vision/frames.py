"""The views of a video's frames, while they are prepared: in memory, or in a file if there are too many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.vision.frame_file import FrameFile
from vtx.runtime.vision.frame_sampling import SampledFrames
from vtx.runtime.vision.limits import MAX_HELD_FRAMES

if TYPE_CHECKING:
    from PIL import Image

    from vtx.runtime.vision.layout import VideoLayout
    from vtx.runtime.vision.plan import Views


class PreparedFrames:
    """Views of frames in a layout. `clip` is what is sampled, as far as it is known, `size` the first frame's."""

    def __init__(self, layout: VideoLayout, settings: ImageSettings) -> None:
        self.clip: SampledFrames | None = None
        self.size: tuple[int, int] | None = None
        self._layout = layout
        self._settings = settings
        self._views = list[NDArray[np.float32]]()
        self._file: FrameFile | None = None

    def begin(self, clip: SampledFrames) -> None:
        """Before the first frame, and again if there turn out to be fewer."""
        self.clip = clip
        if self._file is None and len(clip.numbers) * self._layout.max_views > MAX_HELD_FRAMES:
            self._file = FrameFile(self._layout.together)

    def add(self, frame: Image.Image) -> list[int]:
        """The numbers of a frame's views."""
        assert self.clip is not None, "frames come behind the beginning"
        if self.size is None:
            self.size = frame.size
        views = self._layout.views(frame, self._settings, len(self.clip.numbers))
        if self._file is not None:
            return [self._file.add(view) for view in views]
        self._views.extend(views)
        return [*range(len(self._views) - len(views), len(self._views))]

    def in_order(self, numbers: list[int]) -> Views | FrameFile:
        """The views of these numbers, several in one array where the tower takes them together."""
        if self._file is not None:
            self._file.order = numbers
            return self._file
        together = self._layout.together
        if together is None:
            views = [self._views[number] for number in numbers]
            return np.stack(views) if self._layout.max_views == 1 else views
        missing = -len(numbers) % together
        stacked = np.stack([self._views[number] for number in [*numbers, *numbers[-1:] * missing]])
        return stacked.reshape(-1, together, *stacked.shape[1:])
