"""The Python API: a loaded bundle opens images and answers.

For example:

    model = vtx.load("bundle/")
    with model.open("image.jpg") as image:
        for piece in image.stream("What is on the table?", k=16):
            print(piece, end="")
        answer = image.ask("What colour is it?")  # the image's part of the caches is reused
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.images import ImageOptions, Images
from vtx.runtime.api.loaded import DEFAULT_IMAGES, LoadedBundle
from vtx.runtime.api.options import DEFAULT, K, Options, QuestionKeywords, Settings
from vtx.runtime.api.stream import AnswerStream, AsyncAnswerStream
from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.checks import MOST_THREADS, check_whole
from vtx.runtime.errors import RequestError

if TYPE_CHECKING:
    from typing import Unpack

    from vtx.runtime.api.acting import Actor, Cameras
    from vtx.runtime.api.chunks import Continuation
    from vtx.runtime.api.token_acting import TokenActor
    from vtx.runtime.bundle.card import Card
    from vtx.runtime.vision.layout import ImageDetail


class Model:
    """A loaded bundle. One model serves any number of conversations and threads.

    Use it in a `with` block, or call `close`, to free the engine. `manifest` describes the bundle; `loaded` is the
    state shared by its conversations.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        load_ms: float,
        why: str = "asked for",
        *,
        card: Card | None = None,
        images: ImageOptions = DEFAULT_IMAGES,
    ) -> None:
        self.loaded = LoadedBundle(bundle, backend, load_ms, why, card=card, images=images)
        self.bundle = bundle
        self.backend = backend
        self.manifest = bundle.manifest
        self._actor: Actor | TokenActor | None = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        manifest = self.manifest
        state = ", closed" if self.loaded.conversations.closed else ""
        ks = ", ".join(map(str, manifest.variants)) or "none"
        device = f"{self.backend.device} in {self.backend.compute}"
        return f"<vtx.Model {manifest.model.name}, {manifest.precision} weights, K {ks}, on {device}{state}>"

    def close(self) -> None:
        """Stop running answers and free the engine; the model cannot be used afterwards. Idempotent."""
        self.loaded.close()

    def open(
        self,
        images: Images = (),
        *,
        system: str | None = None,
        fit: str | None = None,
        prefix_file: str | os.PathLike[str] | None = None,
        image_tokens: ImageDetail = None,
    ) -> Conversation:
        """Open any number of images and videos for questions about them.

        Args:
            images: a path, a data URL, bytes, an open file, a PIL image or an array of uint8 ([height, width, 3] RGB,
                `vtx.bgr(array)` BGR, [height, width] grey); or a list of these. A video is the path or the bytes of
                its file, an array [frames, height, width, 3], or `vtx.video` of these.
            system: a system prompt, which precedes every question.
            fit: handling of images with another aspect ratio than the model's: "crop", "pad" or "squash"; default: the
                value given to `load`, else that of the checkpoint's image processor.
            prefix_file: file that saves the KV cache of the prompt before the last image (e.g. a system prompt and
                reference images) for other processes. It is written after the first answer, and overwritten if it
                holds another prompt. Only use files from sources that you would trust with a bundle. If bundles must
                be signed, a file without a signature by the same key (PATH.sig) is ignored, and none is written.
            image_tokens: the most tokens of each image, or "low", "auto" or "high"; default: the bundle's.

        If the chat template puts images before videos, they are reordered accordingly.

        Raises:
            ImageError: an image or video cannot be read or is beyond the limits.
            RequestError: the chat template does not support system prompts, the model does not support videos, or
                `prefix_file` or `image_tokens` cannot be used with this model.

        """
        self.loaded.conversations.check_open()
        file = None if prefix_file is None else Path(prefix_file)
        reader = self.loaded.images.reader(images, fit)
        conversation = Conversation(self.loaded, reader(image_tokens), system, prefix_file=file)
        conversation.reader = reader
        if system is not None:
            self.loaded.prompts.check_system(conversation.opening("?"))
        return conversation

    def act(
        self,
        images: Cameras,
        instruction: str,
        state: ArrayLike | None = None,
        *,
        k: K = DEFAULT,
        noise: ArrayLike | None = None,
        seed: int | None = None,
        steps: int | None = None,
        normalized: bool = False,
        deadline_ms: float | None = None,
        unnorm_key: str | None = None,
        reduce: str | None = DEFAULT,
        after: Continuation | None = None,
    ) -> NDArray[np.float32]:
        """Predict a robot's next actions, [horizon, action size] float32, with a model that outputs actions.

        A model with an action expert (pi0) uses images, an instruction, the state and noise. A model with action
        tokens (OpenVLA) uses one image and an instruction; its horizon is 1.

        Args:
            images: camera images, in the formats of `open`, in training order or by the camera names given at export.
                The tokens of an image that has not changed since the last call are reused.
            instruction: the task, as text.
            state: the robot's state, in its own units. `state`, `noise`, `seed` and `steps` are only for models with
                an expert.
            k: the first layer without image tokens, for the prompt and the expert, or None; default: the bundle's.
            noise: initial noise [horizon, width]; default: random.
            seed: seed of the random noise.
            steps: Euler steps from noise to actions, 1 to 1000; default: the checkpoint's. Fewer steps are faster and
                change the actions; measure their quality yourself.
            normalized: `state` and the actions are in normalised units; both have the model's full widths.
            deadline_ms: time limit from call to actions in milliseconds, including waiting for other threads. Once
                it has passed, `DeadlineError` is raised and no actions are returned. Image tokens and K and V computed
                by then are kept for the next call.
            unnorm_key: for models with action tokens, the dataset whose statistics scale the actions; optional if the
                checkpoint has only one.
            reduce: for models with action tokens, a reduction spec as in `ask`.
            after: for models with an expert, the actions left of the last chunk, to be continued.

        Raises:
            DeadlineError: the deadline has passed.
            RequestError: wrong cameras, a state or noise with the wrong shape or NaN, missing or unknown statistics,
                an argument that this model does not read, or a model that outputs text.
            ContextError: images and instruction do not fit into the context.
            BundleError: the actions are not finite, or the action tokens ended too early; nothing is returned.

        """
        from vtx.runtime.api.acting import ActionRequest

        return self.actor.act(
            ActionRequest(
                images, instruction, state, k, noise, seed, steps, normalized, deadline_ms, unnorm_key, reduce, after
            )
        )

    @property
    def actor(self) -> Actor | TokenActor:
        """The actor behind `act`, with the timings (s) of its last call and the number of newly encoded images."""
        if self._actor is None:
            from vtx.runtime.api.acting import Actor

            if (bins := self.manifest.bins) is None:
                self._actor = Actor(self.loaded)
            else:
                from vtx.runtime.api.token_acting import TokenActor

                self._actor = TokenActor(self.loaded, bins)
        return self._actor

    def ask(
        self, question: str, k: K = DEFAULT, options: Options | None = None, **keywords: Unpack[QuestionKeywords]
    ) -> Answer:
        """Answer a question without an image."""
        with self.open() as conversation:
            return conversation.ask(question, k, options, **keywords)

    def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> Answer:
        """Answer a list of messages with images, in the format of OpenAI's and Hugging Face's libraries.

            model.generate([{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,..."}},
                {"type": "text", "text": "What is on the table?"}]}])

        Images are data URLs, paths, bytes, arrays or PIL images; nothing is downloaded. An image's part may
        have `image_tokens`, or OpenAI's `detail`. Calls are independent: to ask
        several questions about an image, `open` it. With `tools` the answer has `tool_calls`; their results are
        messages {"role": "tool", "tool_call_id": ..., "content": ...} after the assistant's with its `tool_calls`.

        Raises:
            RequestError: malformed messages, or messages that do not end with a question.
            ImageError: an image cannot be read or is beyond the limits.

        """
        return self.stream(messages, k, options, **keywords).read()

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> AnswerStream:
        """Like `generate`, but yield the text piece by piece."""
        from vtx.runtime.api.messages import split_images

        images, turns = split_images(messages)
        if not turns or turns[-1]["role"] not in ("user", "tool"):
            raise RequestError(
                "the last message must be the user's question or a tool's result: a dict with role 'user' or 'tool'"
            )
        self.loaded.prompts.check_system(turns)
        conversation = Conversation(self.loaded, self.loaded.images.prepare_all(images, messages=turns))
        return conversation.stream_messages(turns, Settings.of(k, options, keywords))

    async def agenerate(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> Answer:
        """Like `generate`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
        return await AsyncAnswerStream(self.stream(messages, k, options, **keywords)).read()

    def batch(
        self,
        items: Iterable[tuple[Images, str]],
        k: K = DEFAULT,
        options: Options | None = None,
        *,
        threads: int = 2,
        **keywords: Unpack[QuestionKeywords],
    ) -> Iterator[Answer]:
        """Answer many (image, question) pairs, `threads` at a time, and yield the answers in order.

        Items are read lazily, so they may come from a generator. The first error ends the batch; leaving the loop
        early cancels the running answers.

        Raises:
            RequestError: a wrong option.

        """
        check_whole("threads", threads, 1, MOST_THREADS)
        settings = Settings.of(k, options, keywords)
        self.loaded.policy(settings.k, settings.options, settings.reduce)
        running: weakref.WeakSet[AnswerStream] = weakref.WeakSet()
        leaving = threading.Event()

        def answer(images: Images, question: str) -> Answer:
            with self.open(images) as conversation:
                stream = conversation.stream_messages(conversation.opening(question), settings)
                running.add(stream)
                if leaving.is_set():
                    stream.cancel()
                return stream.read()

        def answers() -> Iterator[Answer]:
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

        return answers()
