"""The room of a prompt with images in a bundle's context, and the limits of images with which it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import ContextError
from vtx.runtime.vision.layouts.pairs import Pairs

if TYPE_CHECKING:
    from vtx.runtime.api.loaded import LoadedBundle
    from vtx.runtime.session.encoded_images import PreparedImage


def check_room(loaded: LoadedBundle, ids: NDArray[np.int64], images: Sequence[PreparedImage]) -> None:
    """Raise ContextError if images or frames do not fit, with the tiles, tokens, pixels or frames that would."""
    room = loaded.manifest.max_context - 1
    if len(ids) <= room:
        return
    prompt = _LongPrompt(loaded, len(ids), tuple(images), room)
    layout = loaded.images.layout
    if layout.max_views == 1 and not prompt.videos and layout.min_tokens is None:
        return
    limits = (prompt.tiles(), prompt.budget(), prompt.pixels(), prompt.frames())
    fixes = [fix for limit in limits for fix in limit]
    vision = sum(image.tokens for image in images)
    raise ContextError(
        f"the prompt takes {len(ids)} tokens, {vision} of them for images, and {room} fit into this bundle beside "
        f"the answer; {', or '.join(fixes) or 'shorten it'}{loaded.manifest.or_more_context}",
        len(ids),
        room + 1,
    )


@dataclass(frozen=True, slots=True)
class _LongPrompt:
    """A prompt of `count` tokens, and `room` for fewer. Methods give the limit that makes it fit, if there is one."""

    loaded: LoadedBundle
    count: int
    images: tuple[PreparedImage, ...]
    room: int

    @property
    def videos(self) -> list[PreparedImage]:
        return [image for image in self.images if image.kind == "video"]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image that is no video."""
        return [image.size for image in self.images if image.kind == "image"]

    @property
    def text_room(self) -> int:
        """The tokens that fit beside the text."""
        return self.room - self.count + sum(self.loaded.text.size(image.in_prompt) for image in self.images)

    def tiles(self) -> Iterator[str]:
        text = self.loaded.text
        for tiles in range(self.loaded.images.layout.max_views - 1, 0, -1):
            layout = self.loaded.images.layout.limited(tiles).for_images(len(self.sizes))
            smaller = (
                layout.prompt_image(*image.size)
                if image.refitted is None
                else image.refitted(image.frames, max_views=tiles)
                for image in self.images
            )
            if sum(map(text.size, smaller)) <= self.text_room:
                yield f"--max-tiles {tiles} (max_tiles={tiles}) fits"
                return

    def budget(self) -> Iterator[str]:
        for tokens in self.loaded.images.layout.budgets:
            layout = next(self.loaded.images.layout.choices(tokens))
            if sum(layout.count(*size) for size in self.sizes) <= self.text_room:
                yield f"--image-tokens {tokens} (image_tokens={tokens}) fits"
                return

    def pixels(self) -> Iterator[str]:
        layout = self.loaded.images.layout
        pixels = self._pixels_of_videos() if self.videos else layout.fitting(self.sizes, self.text_room)
        if pixels and not layout.budgets:
            yield f"--max-pixels {pixels} (max_pixels={pixels}) fits"

    def _pixels_of_videos(self) -> int | None:
        """The largest `max_pixels` at which videos and images take no more tokens than there is room for."""
        layout = self.loaded.images.frames_layout()
        if not isinstance(layout, Pairs):
            return None
        room = self.text_room - sum(self.loaded.text.size(video.in_prompt) - video.tokens for video in self.videos)
        for tokens in range(max(video.tokens for video in self.videos), 0, -1):
            pixels = tokens * layout.unit**2
            count = sum(self.loaded.images.layout.within(pixels).count(*size) for size in self.sizes)
            count += sum(video.refitted(video.frames, pixels).tokens for video in self.videos if video.refitted)
            if count <= room:
                return pixels
        return None

    def frames(self) -> Iterator[str]:
        size = self.loaded.text.size
        rest = self.count - sum(size(video.in_prompt) for video in self.videos)
        for frames in range(max([video.frames for video in self.videos], default=1) - 1, 0, -1):
            if rest + sum(size(video.refitted(frames)) for video in self.videos if video.refitted) <= self.room:
                yield f"--frames {frames} (frames={frames}) of each video fits"
                return
