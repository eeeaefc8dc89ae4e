"""A loaded bundle as conversations and the server need it: its text, its images, its policies."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.accepting import CARD
from vtx.runtime.api.boxes import check_boxes
from vtx.runtime.api.options import DEFAULT, K, Options
from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import PAIRS
from vtx.runtime.bundle.tensors import read_final_norm, read_newline
from vtx.runtime.errors import ModelClosedError, RequestError
from vtx.runtime.policies import to_spec
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import check_layout, check_videos, make_policy, read_rest
from vtx.runtime.policies.methods.withdraw import Rest
from vtx.runtime.prompt.messages import Message, Part, asked_text, image_details, thinking_of
from vtx.runtime.prompt.text import Text, text_files
from vtx.runtime.session.encoded_images import ImageCache, PictureCache, PreparedImage
from vtx.runtime.vision.files.source import is_file, read_file
from vtx.runtime.vision.frame_sampling import SampledFrames
from vtx.runtime.vision.image import ImageSource, load_image
from vtx.runtime.vision.layout import (
    ImageDetail,
    Layout,
    Views,
    check_image_tokens,
    limited_layout,
    settings_for,
    sized_layout,
)
from vtx.runtime.vision.layouts import read_frames, read_layout
from vtx.runtime.vision.limits import DEFAULT_FORMATS, MAX_HELD_FRAMES
from vtx.runtime.vision.preprocess import fitted, note_discarded, shown_region
from vtx.runtime.vision.tokens import PromptImage
from vtx.runtime.vision.video import Video, as_video, load_frames

if TYPE_CHECKING:
    from PIL import Image

    from vtx.runtime.bundle.card import Card
    from vtx.runtime.prompt.guiding import Grammars, Guide, GuidedAnswer
    from vtx.runtime.prompt.text_tower import TextTower
    from vtx.runtime.vision.frame_file import FrameFile
    from vtx.runtime.vision.layout import VideoLayout

log = logging.getLogger(__name__)
Picture: TypeAlias = "ImageSource | Video"
Images: TypeAlias = "Picture | Sequence[Picture]"
ImageReader: TypeAlias = Callable[[ImageDetail], "tuple[PreparedImage, ...]"]


class ImageKeywords(TypedDict, total=False):
    """Settings for reading images, as `load` describes them."""

    fit: str | None
    max_tiles: int | None
    max_pixels: int | None
    image_formats: Sequence[str]


class Closable(Protocol):
    """A conversation, as the bundle sees it that it uses."""

    def close(self) -> None:
        """End a running answer and free the caches."""


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


def opening_parts(images: Sequence[PreparedImage], question: str) -> list[Part]:
    """The content of a first question: images and videos, then the words."""
    pictures: list[Part] = [{"type": "video"} if image.kind == "video" else {"type": "image"} for image in images]
    return [*pictures, {"type": "text", "text": question}]


def opening_messages(
    system: str | None, images: Sequence[PreparedImage], question: str, before: Sequence[Part] = ()
) -> list[Message]:
    """The messages of a first question: the system prompt, if there is one, `before`, and the question about images."""
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": [*before, *opening_parts(images, question)]}]


class LoadedBundle:
    """A bundle on an engine: it prepares images, prompts and policies. Safe for many threads.

    `why` is the reason for this device, `card` the one whose settings are the defaults. `default_k` and
    `default_reduce` are those of questions that name none; `default_rest` goes with that K.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        load_ms: float,
        why: str = "asked for",
        *,
        card: Card | None = None,
        fit: str | None = None,
        max_tiles: int | None = None,
        max_pixels: int | None = None,
        image_formats: Sequence[str] = DEFAULT_FORMATS,
    ) -> None:
        self.bundle = bundle
        self.backend = backend
        self.load_ms = load_ms
        self.why = why
        self.fit = fit
        self.image_formats = image_formats
        self.manifest = manifest = bundle.manifest
        self.card = card
        self.default_k = manifest.default_k
        self.default_reduce = next(iter(manifest.reductions), None)
        self.default_rest: str | int | None = None
        if card is not None:
            fitted = card.chosen.configuration
            self.default_k = fitted.k
            self.default_reduce = fitted.reduce
            self.default_rest = fitted.rest
            if max_tiles is None and max_pixels is None and fit != "released":
                max_tiles = fitted.max_tiles
                max_pixels = fitted.max_pixels
        self.text = Text(
            *text_files(bundle.read),
            manifest.text,
            max_context=manifest.max_context,
            or_more_context=manifest.or_more_context,
            vocab=max(manifest.model.vocab, manifest.text.image_token_id + 1),  # which may be in no table
        )
        self.layout = limited_layout(read_layout(manifest.layout, manifest.model.tower), max_tiles, max_pixels)
        self._max_tiles = max_tiles
        self._max_pixels = max_pixels
        self._newline = (
            read_newline(bundle) if self.layout.newline else np.zeros((0, manifest.model.hidden), np.float32)
        )
        self._final_norm = read_final_norm(bundle) if manifest.text.seg_token_id is not None else None
        self.image_cache: ImageCache | None = None  # set: conversations share encoded images
        self.tile_cache: ImageCache | None = None  # set: and the encoded tiles that images have in common
        self.picture_cache: PictureCache | None = None  # set: a file that comes again is not decoded again
        self._conversations: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._text_tower: TextTower | None = None
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()
        self._release_noted = False
        self.closed = False

    def close(self) -> None:
        """End running answers and free the engine. Closing twice does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            conversations = list(self._conversations)
        for conversation in conversations:
            conversation.close()
        self.backend.close()
        log.info("closed %s", self.bundle.folder)

    def check_open(self) -> None:
        """Raise ModelClosedError if the bundle was closed."""
        if self.closed:
            raise ModelClosedError("the model is closed; load it again with vtx.load")

    def register(self, conversation: Closable) -> None:
        """Close a conversation with the bundle."""
        with self._lock:
            self.check_open()
            if not self._release_noted and self.manifest.release is not None:
                self.bundle.note_release()
                self._release_noted = True
            self._conversations.add(conversation)

    def policy(
        self,
        k: K = DEFAULT,
        options: Options | None = None,
        reduce: str | None = DEFAULT,
        images: Sequence[PreparedImage] = (),
    ) -> Policy:
        """The policy that K, reductions and a rest mean for this bundle and these images; its defaults if left out.

        Raises RequestError: values of another type, or for which the bundle was not exported.
        """
        if reduce is not None and not isinstance(reduce, str):
            raise RequestError(f"reduce is {reduce!r:.40}; it must be a spec such as 'fastv:k=3', or 'none'")
        manifest = self.manifest
        options = options or Options()
        k, rest = self._depth(k, options)
        policy = make_policy(
            k,
            manifest,
            self.backend.gate,
            options.gate_threshold,
            rest=rest,
            reduce=self.default_reduce if reduce == DEFAULT else reduce,
            dialect=self.backend.dialect,
            final_norm=lambda: read_final_norm(self.bundle),
        )
        if policy.reductions:
            check_layout(policy.reductions, self.layout)
        if videos := [image for image in images if image.kind == "video"]:
            between = any(any(video.in_prompt.texts) for video in videos if not video.counted)
            check_videos(policy.reductions, between=between, frames=max(video.frames for video in videos))
        if options.boxes:
            check_boxes(manifest)
        if options.about is not None and not policy.uses_question:
            raise RequestError(
                "about is the text by which image tokens are chosen before the decoder, and reduce="
                f"{to_spec(policy.reductions)} chooses none by a text; use cdpruner, or leave about out"
            )
        return policy

    def _depth(self, k: K, options: Options) -> tuple[K, Rest | None]:
        """K and the rest that a question asks for; the default rest goes with the default K."""
        rest = options.rest
        if isinstance(k, str) and k == CARD and rest is None:
            if self.card is None or not self.card.kinds:
                why = "no card is in use" if self.card is None else "the card has no K by kind of answer"
                raise RequestError(f"K is card, and {why}; run vtx-fit, or give K as a number, or none")
            from vtx.runtime.api.kinds import card_depth

            return card_depth(self.card.kinds, options.guide, self.manifest.model)
        if isinstance(k, str) and k == DEFAULT:
            k = self.default_k
            rest = self.default_rest if rest is None else rest
        return k, None if rest is None else read_rest(rest)

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
        order = self.text.order(messages or [{"role": "user", "content": opening_parts(images, "?")}])
        return tuple(images[number] for number in order)

    def prepare_video(
        self, video: Video, fit: str | None = None, stopped: Callable[[], bool] | None = None
    ) -> PreparedImage:
        """Read some frames of a video and preprocess them, until `stopped` returns True."""
        if self.manifest.video is None:
            raise RequestError(f"{self.manifest.model.name} takes no videos; give frames of it as images")
        from vtx.runtime.vision.frame_file import FrameFile

        layout = self.frames_layout()
        settings = self.manifest.video.image
        fit = self.fit if fit is None else fit
        settings = settings_for(self.layout, settings, fit) if settings.own_size else fitted(settings, fit)
        sizes = list[tuple[int, int]]()
        clips = list[SampledFrames]()
        held = list[NDArray[np.float32]]()
        files = list[FrameFile]()  # one, if there are too many frames for memory

        def begun(clip: SampledFrames) -> None:
            clips.append(clip)
            if len(clip.numbers) * layout.max_views > MAX_HELD_FRAMES and not files:
                files.append(FrameFile(layout.together))

        def prepared(frame: Image.Image) -> list[int]:
            """The numbers of a prepared frame's views, in memory or in the file."""
            sizes.append(frame.size)
            views = layout.views(frame, settings, len(clips[-1].numbers))
            if files:
                return [files[0].add(view) for view in views]
            held.extend(views)
            return [*range(len(held) - len(views), len(held))]

        frames = load_frames(video, layout.sampling, prepared, stopped, begun=begun)
        size = sizes[0]
        clip = clips[-1]
        order = [number for numbers in frames for number in numbers]
        views: Views | FrameFile
        if files:
            views, files[0].order = files[0], order
        elif layout.together is not None:
            order += order[-1:] * (-len(order) % layout.together)
            views = np.stack([held[number] for number in order])
            views = views.reshape(-1, layout.together, *views.shape[1:])
        else:
            views = [held[number] for number in order]
            views = np.stack(views) if layout.max_views == 1 else views
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
        counted = self.manifest.video.layout.name == PAIRS
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

        `check` is called before it is decoded and may raise; a picture that the `picture_cache` has of the `tenant` is
        not checked.
        """
        fit = self.fit if fit is None else fit
        check_image_tokens(self.layout, image_tokens)
        layout = self.layout.for_images(of_images)
        settings = settings_for(self.layout, self.manifest.image, fit)
        if fit == "released" and not settings.within:
            layout = self.layout.released()

        def prepared(source: ImageSource) -> PreparedImage:
            check(source)
            image = load_image(source, self.image_formats)
            sized = sized_layout(layout, image_tokens, *image.size)
            return self._prepared(image, sized, settings, " released" * (fit == "released"))

        if self.picture_cache is None or not is_file(source):
            return prepared(source)
        file = read_file(source)
        key = hashlib.sha256(file.content).digest(), fit, of_images, image_tokens
        return self.picture_cache.prepared(key, partial(prepared, file), tenant)

    def _prepared(self, image: Image.Image, layout: Layout, settings: ImageSettings, released: str) -> PreparedImage:
        """An image that is read, in its layout; `released` marks its key."""
        width, height = image.size
        note_discarded(width, height, settings)
        views = layout.views(image, settings)
        digest = hashlib.sha256()
        for view in views:
            digest.update(view.tobytes())
        key = digest.hexdigest()
        # Tiles alone do not tell how much of them is padding, nor an image's sides from their product.
        if len(views) > 1 or settings.own_size:
            key += f" of {width}x{height}" + released
        arrange = partial(layout.arrange, width=width, height=height, newline=self._newline)
        region = (0.0, 0.0, float(width), float(height))
        if layout.max_views == 1 and not settings.own_size and not settings.within:
            region = shown_region(width, height, settings)
        return PreparedImage(views, key, layout.prompt_image(width, height), image.size, arrange, region=region)

    def prompt_ids(self, messages: Sequence[Message], images: Sequence[PreparedImage] = ()) -> NDArray[np.int64]:
        """Token ids of messages, with all tokens of each image, or one for each if no images are given.

        Raises RequestError: they cannot be asked.
        """
        return self.text.asked(messages, [image.in_prompt for image in images] or 1)

    def check_system(self, messages: Sequence[Message]) -> None:
        """Raise RequestError if the chat template silently drops a system prompt."""
        others = [message for message in messages if message["role"] != "system"]
        if len(others) < len(messages) and np.array_equal(self.prompt_ids(messages), self.prompt_ids(others)):
            raise RequestError(
                "this model's chat template has no place for a system prompt; leave it out, "
                "or export with a --chat-template that prints it"
            )

    def check_thinking(self, messages: Sequence[Message], options: Options) -> None:
        """Raise RequestError for thoughts that are switched on or off, or limited, if the chat template has no way to.

        They may be switched off where there are none.
        """
        thinking = thinking_of(messages)
        if (thinking or (thinking is False and self.text.thought_form)) and not self.text.switches_thinking:
            raise RequestError(
                "this model's chat template has no switch for thoughts (enable_thinking); leave thinking out"
            )
        if options.max_thinking_tokens is not None and self.text.thought_form is None:
            raise RequestError("this model's chat template has no marks of thoughts; leave max_thinking_tokens out")
        if thinking and messages[-1]["role"] == "assistant":
            raise RequestError("the answer begins with text, before which no thought has a place; leave thinking out")

    def embed_question(self, messages: Sequence[Message]) -> NDArray[np.float32]:
        """The embeddings [segments, width] of the question about the last image, by the bundle's text tower."""
        spec = self.manifest.text_tower
        assert spec is not None, "policies that need a text tower are refused if there is none"
        if self._text_tower is None:
            from vtx.runtime.prompt.text_tower import TextTower

            self._text_tower = TextTower(self.bundle.read, spec, self.backend.text_tower)
        return self._text_tower.embed(asked_text(messages))

    def guided(self, guide: Guide) -> GuidedAnswer:
        """A new answer in a form; compiled forms are kept.

        Raises DeviceError: llguidance is not installed; RequestError: the form cannot be compiled or allows no answer,
        or llguidance does not read the tokenizer.
        """
        with self._lock:
            if self._grammars is None:
                from vtx.runtime.prompt.guiding import Grammars

                self._grammars = Grammars(self.text, self.manifest.model.vocab)
        return self._grammars.start(guide)

    def frames_layout(self) -> VideoLayout:
        """The layout of videos, within the limits of views and pixels that images have here."""
        assert self.manifest.video is not None, "videos are refused if the bundle takes none"
        layout = read_frames(self.manifest.video.layout)
        layout = layout if self._max_tiles is None else layout.limited(self._max_tiles)
        return layout if self._max_pixels is None else layout.within(self._max_pixels)

    def normed(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """The hidden state [hidden] of the last layer after the decoder's final norm."""
        assert self._final_norm is not None, "bundles with a segmentation token have the norm's weight"
        scale = np.float32(math.sqrt(float(np.square(state).mean()) + self.manifest.model.eps))
        return state / scale * self._final_norm
