"""The Python API: a loaded bundle opens images and answers.

For example:

    model = vtx.load("bundle/")
    with model.open("image.jpg") as image:
        for piece in image.stream("What is on the table?", k=16):
            print(piece, end="")
        answer = image.ask("What colour is it?")  # the image's part of the caches is reused
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation, opening_parts
from vtx.runtime.api.messages import split_images
from vtx.runtime.api.options import DEFAULT, K, OptionKeywords, Options, combined
from vtx.runtime.api.stream import AnswerStream, AsyncAnswerStream
from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.tensors import read_final_norm, read_newline
from vtx.runtime.checks import MOST_THREADS, check_whole
from vtx.runtime.errors import ContextError, ModelClosedError, RequestError
from vtx.runtime.policies.make import check_layout, make_policy
from vtx.runtime.policies.policy import Policy
from vtx.runtime.prompt.messages import Message, asked_text
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.text_tower import TextTower
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.session.image_cache import ImageCache
from vtx.runtime.vision.files.formats import check_formats
from vtx.runtime.vision.fit import fitted, note_discarded
from vtx.runtime.vision.image import ImageSource, load_image
from vtx.runtime.vision.layout import limited_layout, settings_for
from vtx.runtime.vision.layout_spec import read_frames, read_layout
from vtx.runtime.vision.limits import DEFAULT_FORMATS
from vtx.runtime.vision.preprocess import preprocess
from vtx.runtime.vision.video import Video, as_video, load_frames

if TYPE_CHECKING:
    from typing import Unpack

    from PIL import Image

log = logging.getLogger(__name__)
Picture: TypeAlias = "ImageSource | Video"
Images: TypeAlias = "Picture | Sequence[Picture]"


class Model:
    """A loaded bundle. One model serves any number of conversations and threads. `why` says why on this device.

    Use it in a `with` block, or call `close`, to free the engine.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        load_ms: float,
        why: str = "asked for",
        *,
        fit: str | None = None,
        max_tiles: int | None = None,
        max_pixels: int | None = None,
        image_formats: Sequence[str] = DEFAULT_FORMATS,
    ) -> None:
        self.bundle, self.backend, self.load_ms, self.why = bundle, backend, load_ms, why
        self.fit, self.image_formats = fit, check_formats(image_formats)
        manifest = bundle.manifest
        self.text = Text.load(
            bundle.read, manifest.text, max_context=manifest.max_context, or_more_context=manifest.or_more_context,
            vocab=manifest.model.vocab,
        )  # fmt: skip
        self.layout = limited_layout(read_layout(manifest.layout, manifest.model.tower), max_tiles, max_pixels)
        self._newline = (
            read_newline(bundle) if self.layout.newline else np.zeros((0, manifest.model.hidden), np.float32)
        )
        self._final_norm = read_final_norm(bundle) if manifest.text.seg_token_id is not None else None
        self.image_cache: ImageCache | None = None  # set: conversations share encoded images
        self._conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()
        self._text_tower: TextTower | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        manifest, state = self.manifest, ", closed" if self._closed else ""
        ks = ", ".join(map(str, manifest.variants)) or "none"
        device = f"{self.backend.device} in {self.backend.compute}"
        return f"<vtx.Model {manifest.model.name}, {manifest.precision} weights, K {ks}, on {device}{state}>"

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.bundle.manifest

    def close(self) -> None:
        """End running answers and free the engine; the model cannot be used afterwards. Closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            conversations = list(self._conversations)
        for conversation in conversations:
            conversation.close()
        self.backend.close()
        log.info("closed %s", self.bundle.folder)

    def check_open(self) -> None:
        """Raise ModelClosedError where the model was closed."""
        if self._closed:
            raise ModelClosedError("the model is closed; load it again with vtx.load")

    def register(self, conversation: Conversation) -> None:
        """Have a conversation closed with the model."""
        with self._lock:
            self.check_open()
            self._conversations.add(conversation)

    def open(self, images: Images = (), *, system: str | None = None, fit: str | None = None) -> Conversation:
        """Open one image or video, several, or none, for questions about them.

        Args:
            images: a path, a data URL, bytes, an open file, a PIL image or an array of uint8 ([height, width, 3] RGB,
                `vtx.bgr(array)` BGR, [height, width] grey); or a list of these. A video is the path or the bytes of
                its file, an array [frames, height, width, 3], or `vtx.video` of these.
            system: a system prompt, which stands before every question.
            fit: what becomes of images of another shape than the model takes: "crop", "pad" or "squash"; when left
                out, what `load` was given, else what the checkpoint's image processor says.

        Where the chat template prints images before videos, they stand in that order.

        Raises:
            ImageError: an image or video cannot be read or is beyond the limits.
            RequestError: the chat template has no place for a system prompt, or the model takes no videos.

        """
        self.check_open()
        many = cast("Sequence[Picture]", images if isinstance(images, list | tuple) else [images])
        conversation = Conversation(self, self.in_order(self.prepare_all(many, fit)), system)
        if system is not None:
            self.check_system(conversation.opening("?"))
        return conversation

    def ask(
        self, question: str, k: K = DEFAULT, options: Options | None = None, **keywords: Unpack[OptionKeywords]
    ) -> Answer:
        """Answer a question without an image."""
        with self.open() as conversation:
            return conversation.ask(question, k, options, **keywords)

    def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> Answer:
        """Answer a list of messages, images among them, as OpenAI's and Hugging Face's libraries write them.

            model.generate([{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,..."}},
                {"type": "text", "text": "What is on the table?"}]}])

        Images are data URLs, paths, bytes, arrays or PIL images; nothing is downloaded. Each call starts afresh: to
        ask several questions about an image, `open` it.

        Raises:
            RequestError: messages of another form, or that do not end with a question.
            ImageError: an image cannot be read or is beyond the limits.

        """
        return self.stream(messages, k, options, reduce=reduce, **keywords).read()

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> AnswerStream:
        """As `generate`, giving the text piece by piece."""
        images, turns = split_images(messages)
        if not turns or turns[-1]["role"] != "user":
            raise RequestError("the last message must be the user's question: a dict with role 'user'")
        self.check_system(turns)
        prepared = self.prepare_all(images)
        conversation = Conversation(self, tuple(prepared[number] for number in self.text.order(turns)))
        return conversation.stream_messages(turns, k, combined(options, keywords), reduce)

    async def agenerate(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> Answer:
        """As `generate`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
        return await AsyncAnswerStream(self.stream(messages, k, options, reduce=reduce, **keywords)).read()

    def batch(
        self,
        items: Iterable[tuple[Images, str]],
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        threads: int = 2,
        reduce: str | None = DEFAULT,
        **keywords: Unpack[OptionKeywords],
    ) -> Iterator[Answer]:
        """Answer many (image, question) pairs, `threads` of them at a time, in their order.

        Items are taken as they are needed, so they may come from a generator. The first error ends the batch; leaving
        the loop early cancels what runs.

        Raises:
            RequestError: a wrong option.

        """
        check_whole("threads", threads, 1, MOST_THREADS)
        settings = combined(options, keywords)
        self.policy(k, settings, reduce)
        return self._batch(items, k, settings, reduce, threads)

    def _batch(
        self, items: Iterable[tuple[Images, str]], k: K, options: Options, reduce: str | None, threads: int
    ) -> Iterator[Answer]:
        running: weakref.WeakSet[AnswerStream] = weakref.WeakSet()
        leaving = threading.Event()

        def answer(images: Images, question: str) -> Answer:
            with self.open(images) as conversation:
                stream = conversation.stream(question, k, options, reduce=reduce)
                running.add(stream)
                if leaving.is_set():
                    stream.cancel()
                return stream.read()

        window = deque[Future[Answer]]()
        with ThreadPoolExecutor(threads, "vtx-batch") as pool:
            try:
                for images, question in items:
                    window.append(pool.submit(answer, images, question))
                    if len(window) > threads:
                        yield window.popleft().result()
                while window:
                    yield window.popleft().result()
            finally:
                leaving.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for stream in list(running):
                    stream.cancel()

    def normed(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """A hidden state [hidden] of the last layer behind the decoder's last norm."""
        assert self._final_norm is not None, "bundles with a segmentation token have the norm's weight"
        scale = np.float32(math.sqrt(float(np.square(state).mean()) + self.manifest.model.eps))
        return state / scale * self._final_norm

    def policy(self, k: K = DEFAULT, options: Options | None = None, reduce: str | None = DEFAULT) -> Policy:
        """What `k` and `reduce` mean for this bundle; its defaults where they are left out.

        Raises:
            RequestError: values of another type, or for which the bundle was not exported.

        """
        if reduce is not None and not isinstance(reduce, str):
            raise RequestError(f"reduce is {reduce!r:.40}; it must be a spec such as 'fastv:k=3', or 'none'")
        manifest = self.manifest
        depth = manifest.default_k if isinstance(k, str) and k == DEFAULT else k
        wanted = next(iter(manifest.reductions), None) if reduce == DEFAULT else reduce
        threshold = (options or Options()).gate_threshold
        policy = make_policy(
            depth,
            manifest,
            self.backend.gate,
            threshold,
            reduce=wanted,
            dialect=self.backend.dialect,
            final_norm=lambda: read_final_norm(self.bundle),
        )
        check_layout(policy.reductions, self.layout)
        return policy

    def prepare_all(
        self, sources: Sequence[Picture], fit: str | None = None, stopped: Callable[[], bool] | None = None
    ) -> tuple[PreparedImage, ...]:
        """Read and preprocess the images and videos of one prompt, as `open` does; `stopped` ends reading a video."""
        given = [as_video(source) or source for source in sources]
        images = sum(not isinstance(source, Video) for source in given)
        return tuple(
            self.prepare_video(source, fit, stopped)
            if isinstance(source, Video)
            else self.prepare(source, fit, among=images)
            for source in given
        )

    def in_order(self, images: Sequence[PreparedImage]) -> tuple[PreparedImage, ...]:
        """Images and videos of a first question, in the order in which the chat template prints them there."""
        order = self.text.order([{"role": "user", "content": opening_parts(images, "?")}])
        return tuple(images[number] for number in order)

    def prepare_video(
        self, video: Video, fit: str | None = None, stopped: Callable[[], bool] | None = None
    ) -> PreparedImage:
        """Read some frames of a video and preprocess them, unless `stopped` says that nobody waits any more."""
        if self.manifest.video is None:
            raise RequestError(f"{self.manifest.model.name} takes no videos; give frames of it as images")
        layout = read_frames(self.manifest.video.layout)
        settings = fitted(self.manifest.video.image, self.fit if fit is None else fit)
        sizes = list[tuple[int, int]]()

        def prepared(frame: Image.Image) -> NDArray[np.float32]:
            sizes.append(frame.size)
            return preprocess(frame, settings)

        wanted = video.frames or layout.frames
        views = np.stack(load_frames(video, wanted, prepared, stopped, padded=layout.padded))
        note_discarded(*sizes[0], settings)
        key = f"{hashlib.sha256(views.tobytes()).hexdigest()} of a video"
        arrange = partial(layout.arrange, newline=self._newline)
        return PreparedImage(views, key, layout.prompt_image(len(views)), sizes[0], arrange, "video")

    def prepare(self, source: ImageSource, fit: str | None = None, *, among: int = 1) -> PreparedImage:
        """Read and preprocess an image that is one of `among` images in a prompt."""
        layout = self.layout.for_images(among)
        settings = settings_for(self.layout, self.manifest.image, self.fit if fit is None else fit)
        image = load_image(source, self.image_formats)
        width, height = image.size
        note_discarded(width, height, settings)
        views = layout.views(image, settings)
        key = hashlib.sha256(views.tobytes()).hexdigest()
        # Of tiles alone one cannot tell how much of them is padding, nor an image's sides from their product.
        if len(views) > 1 or settings.own_size:
            key += f" of {width}x{height}"
        arrange = partial(layout.arrange, width=width, height=height, newline=self._newline)
        return PreparedImage(views, key, layout.prompt_image(width, height), image.size, arrange)

    def prompt_ids(self, messages: Sequence[Message], images: Sequence[PreparedImage] = ()) -> NDArray[np.int64]:
        """Token ids of messages, each image standing as all its tokens, or as one where none are given.

        Raises:
            RequestError: they cannot be asked.

        """
        return self.text.prompt(messages, [image.in_prompt for image in images] or 1)

    def check_room(self, ids: NDArray[np.int64], images: Sequence[PreparedImage]) -> None:
        """Raise ContextError where images or frames do not fit, with the tiles, pixels or frames that would."""
        room = self.manifest.max_context - 1
        videos = [image for image in images if image.kind == "video"]
        if len(ids) <= room or (self.layout.max_views == 1 and not videos and self.layout.min_tokens is None):
            return
        vision = sum(image.tokens for image in images)
        text = len(ids) - sum(self.text.size(image.in_prompt) for image in images)
        fewer = range(self.layout.max_views - 1, 0, -1)
        fitting = next((tiles for tiles in fewer if self._fits(tiles, text, images)), 0)
        cures = [f"--max-tiles {fitting} (max_tiles={fitting}) fits"] if fitting else []
        sizes = [image.size for image in images]
        if pixels := self.layout.fitting(sizes, room - text):
            cures.append(f"--max-pixels {pixels} (max_pixels={pixels}) fits")
        if videos and self.manifest.video is not None:
            layout, others = read_frames(self.manifest.video.layout), len(ids) - sum(video.tokens for video in videos)
            fewer = range(max(len(video.views) for video in videos) - 1, 0, -1)
            frames = next((n for n in fewer if others + len(videos) * layout.count(n) <= room), 0)
            cures += [f"--frames {frames} (frames={frames}) of each video fits"] if frames else []
        raise ContextError(
            f"the prompt takes {len(ids)} tokens, {vision} of them for images, and {room} fit into this bundle beside "
            f"the answer; {', or '.join(cures) or 'shorten it'}{self.manifest.or_more_context}"
        )

    def _fits(self, max_tiles: int, text: int, images: Sequence[PreparedImage]) -> bool:
        layout = self.layout.limited(max_tiles).for_images(sum(image.kind == "image" for image in images))
        counts = (image.in_prompt if image.kind == "video" else layout.prompt_image(*image.size) for image in images)
        return text + sum(map(self.text.size, counts)) < self.manifest.max_context

    def embed_question(self, messages: Sequence[Message]) -> NDArray[np.float32]:
        """The embeddings [segments, width] of what was asked about the last image, by the bundle's text tower."""
        spec = self.manifest.text_tower
        assert spec is not None, "policies that need a text tower are refused where there is none"
        if self._text_tower is None:
            self._text_tower = TextTower.load(self.bundle.read, spec, self.backend.text_tower)
        return self._text_tower.embed(asked_text(messages))

    def check_system(self, messages: Sequence[Message]) -> None:
        """Raise RequestError where the chat template drops a system prompt without a word."""
        others = [message for message in messages if message["role"] != "system"]
        if len(others) < len(messages) and np.array_equal(self.prompt_ids(messages), self.prompt_ids(others)):
            raise RequestError(
                "this model's chat template has no place for a system prompt; leave it out, "
                "or export with a --chat-template that prints it"
            )
