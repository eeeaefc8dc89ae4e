"""Images and videos of prompts: read, and preprocessed as the bundle's layouts have it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import PAIRS
from vtx.runtime.bundle.tensors import read_newline
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.messages import Message, Part, image_details
from vtx.runtime.session.encoded_images import ImageCaches, PreparedImage
from vtx.runtime.vision.files.source import is_file, read_file
from vtx.runtime.vision.frames import PreparedFrames
from vtx.runtime.vision.image import ImageSource, load_image
from vtx.runtime.vision.layout import (
    ImageDetail,
    Layout,
    check_image_tokens,
    limited_layout,
    settings_for,
    sized_layout,
)
from vtx.runtime.vision.layouts import read_frames, read_layout
from vtx.runtime.vision.limits import DEFAULT_FORMATS
from vtx.runtime.vision.preprocess import fitted, note_discarded, shown_region
from vtx.runtime.vision.tokens import PromptImage
from vtx.runtime.vision.video import Video, as_video, load_frames

if TYPE_CHECKING:
    from PIL import Image

    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.prompt.text import Text
    from vtx.runtime.vision.layout import VideoLayout

Picture: TypeAlias = "ImageSource | Video"
Images: TypeAlias = "Picture | Sequence[Picture]"
ImageReader: TypeAlias = Callable[[ImageDetail], "tuple[PreparedImage, ...]"]


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Settings for reading images, as `load` describes them."""

    fit: str | None = None
    max_tiles: int | None = None
    max_pixels: int | None = None
    formats: Sequence[str] = DEFAULT_FORMATS


def as_list(images: Images) -> Sequence[Picture]:
    """One image or video, or several, as a list."""
    return cast("Sequence[Picture]", images if isinstance(images, list | tuple) else [images])


def sized_message(images: Sequence[Picture], image_tokens: ImageDetail) -> list[Message] | None:
    """A question about images and videos, in which each image has `image_tokens`; None if that is None.

    Raises RequestError if there is no image.
    """
    if image_tokens is None:
        return None
    parts: list[Part] = [{"type": "video" if as_video(source) else "image"} for source in images]
    stills = [part for part in parts if part["type"] == "image"]
    if not stills:
        raise RequestError("image_tokens is for images, not for videos and texts; leave it out")
    for part in stills:
        part["image_tokens"] = image_tokens
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


class ImagePreparer:
    """Reads and preprocesses the images and videos of prompts. Safe for many threads.

    A file that `caches` has a picture of is not decoded again.
    """

    def __init__(self, bundle: Bundle, text: Text, options: ImageOptions, caches: ImageCaches) -> None:
        manifest = bundle.manifest
        layout = read_layout(manifest.layout, manifest.model.tower)
        self.options = options
        self.layout = limited_layout(layout, options.max_tiles, options.max_pixels)
        self._manifest = manifest
        self._text = text
        self._caches = caches
        self._newline = (
            read_newline(bundle) if self.layout.newline else np.zeros((0, manifest.model.hidden), np.float32)
        )

    def reader(self, images: Images, fit: str | None = None) -> ImageReader:
        """A function that reads and preprocesses the images and videos of a first question, by `image_tokens`."""
        sources = as_list(images)
        return lambda image_tokens: self.prepare_all(sources, fit, messages=sized_message(sources, image_tokens))

    def prepare_all(
        self,
        sources: Sequence[Picture],
        fit: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        stopped: Callable[[], bool] | None = None,
        check: Callable[[ImageSource], None] = lambda _: None,
        tenant: str = "",
    ) -> tuple[PreparedImage, ...]:
        """Read and preprocess the images and videos of one prompt, in the order in which the chat template prints them.

        `messages` is the prompt, a first question if left out, whose parts have the `image_tokens` of their images;
        `stopped` ends reading a video; `check` and `tenant` are as for `prepare`.
        """
        given = list[Picture]()
        number = 0
        images = list[PreparedImage]()
        for source in sources:
            given.append(as_video(source) or source)
            number += not isinstance(given[-1], Video)
        details = image_details(messages or ()) or [None] * len(given)
        for source, detail in zip(given, details, strict=True):
            if isinstance(source, Video):
                images.append(self.prepare_video(source, fit, stopped))
            else:
                prepare = partial(self.prepare, source, fit, of_images=number, image_tokens=detail)
                images.append(prepare(check=check, tenant=tenant))
        if number in (0, len(images)):
            return tuple(images)
        order = self._text.order(messages or [{"role": "user", "content": opening_parts(images, "?")}])
        return tuple(images[number] for number in order)

    def prepare_video(
        self, video: Video, fit: str | None = None, stopped: Callable[[], bool] | None = None
    ) -> PreparedImage:
        """Read some frames of a video and preprocess them, until `stopped` returns True."""
        if self._manifest.video is None:
            raise RequestError(f"{self._manifest.model.name} takes no videos; give frames of it as images")
        layout = self.frames_layout()
        settings = self._manifest.video.image
        fit = self.options.fit if fit is None else fit
        settings = settings_for(self.layout, settings, fit) if settings.own_size else fitted(settings, fit)
        prepared = PreparedFrames(layout, settings)
        frames = load_frames(video, layout.sampling, prepared.add, stopped, begun=prepared.begin)
        clip = prepared.clip
        size = prepared.size
        assert clip is not None
        assert size is not None
        views = prepared.in_order([number for numbers in frames for number in numbers])
        note_discarded(*size, settings)
        digest = hashlib.sha256()
        for view in views:
            digest.update(view.tobytes())
        key = f"{digest.hexdigest()} of a video"
        form = layout.prompt_image(clip, *size)
        key += f" {size} {clip}" * settings.own_size  # their shape and times are not in the pixels

        def refitted(frames: int, max_pixels: int | None = None, max_views: int | None = None) -> PromptImage:
            smaller = layout if max_pixels is None else layout.within(max_pixels)
            smaller = smaller if max_views is None else smaller.limited(max_views)
            return smaller.prompt_image(clip if frames == len(clip.numbers) else layout.sampled(clip, frames), *size)

        arrange = partial(layout.arrange, clip=clip, width=size[0], height=size[1], newline=self._newline)
        counted = self._manifest.video.layout.name == PAIRS
        return PreparedImage(views, key, form, size, arrange, "video", len(clip.numbers), refitted, counted=counted)

    def prepare(
        self,
        source: ImageSource,
        fit: str | None = None,
        *,
        of_images: int = 1,
        image_tokens: ImageDetail = None,
        check: Callable[[ImageSource], None] = lambda _: None,
        tenant: str = "",
    ) -> PreparedImage:
        """Read and preprocess an image of a prompt with `of_images` images, to at most `image_tokens` tokens.

        `check` is called before it is decoded and may raise; a picture that the caches have of the `tenant` is not
        checked.
        """
        fit = self.options.fit if fit is None else fit
        check_image_tokens(self.layout, image_tokens)
        layout = self.layout.for_images(of_images)
        settings = settings_for(self.layout, self._manifest.image, fit)
        if fit == "released" and not settings.within:
            layout = self.layout.released()

        def prepared(source: ImageSource) -> PreparedImage:
            check(source)
            image = load_image(source, self.options.formats)
            sized = sized_layout(layout, image_tokens, *image.size)
            return self._prepared(image, sized, settings, " released" * (fit == "released"))

        if self._caches.pictures is None or not is_file(source):
            return prepared(source)
        file = read_file(source)
        key = hashlib.sha256(file.content).digest(), fit, of_images, image_tokens
        return self._caches.pictures.prepared(key, partial(prepared, file), tenant)

    def _prepared(self, image: Image.Image, layout: Layout, settings: ImageSettings, released: str) -> PreparedImage:
        """An image that is read, in its layout; `released` marks its key."""
        width, height = image.size
        note_discarded(width, height, settings)
        plan = layout.plan(width, height)
        views = plan.pixels(image, settings)
        digest = hashlib.sha256()
        for view in views:
            digest.update(view.tobytes())
        key = digest.hexdigest()
        # Tiles alone do not tell how much of them is padding, nor an image's sides from their product.
        if len(views) > 1 or settings.own_size:
            key += f" of {width}x{height}" + released
        arrange = partial(plan.arrange, newline=self._newline)
        region = (0.0, 0.0, float(width), float(height))
        if layout.max_views == 1 and not settings.own_size and not settings.within:
            region = shown_region(width, height, settings)
        return PreparedImage(views, key, plan.prompt, image.size, arrange, region=region)

    def frames_layout(self) -> VideoLayout:
        """The layout of videos, within the limits of views and pixels that images have here."""
        assert self._manifest.video is not None, "videos are refused if the bundle takes none"
        layout = read_frames(self._manifest.video.layout)
        layout = layout if self.options.max_tiles is None else layout.limited(self.options.max_tiles)
        return layout if self.options.max_pixels is None else layout.within(self.options.max_pixels)
