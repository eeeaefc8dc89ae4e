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
from vtx.runtime.api.loaded import ImageKeywords, Images, LoadedBundle, as_list
from vtx.runtime.api.options import DEFAULT, K, Options, QuestionKeywords, Settings
from vtx.runtime.api.stream import AnswerStream, AsyncAnswerStream
from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.checks import MOST_THREADS, check_whole
from vtx.runtime.errors import RequestError

if TYPE_CHECKING:
    from typing import Unpack

    from vtx.runtime.api.acting import Actor, Cameras
    from vtx.runtime.api.token_acting import TokenActor
    from vtx.runtime.bundle.card import Card


class Model:
    """A loaded bundle. One model serves any number of conversations and threads.

    Use it in a `with` block, or call `close`, to free the engine. `manifest` describes the bundle; `loaded` is what
    conversations use of it.
    """

    def __init__(
        self, bundle: Bundle, backend: Backend, load_ms: float, why: str = "asked for", *, card: Card | None = None,
        **images: Unpack[ImageKeywords],
    ) -> None:  # fmt: skip
        self.loaded = LoadedBundle(bundle, backend, load_ms, why, card=card, **images)
        self.bundle, self.backend, self.manifest = bundle, backend, bundle.manifest
        self._actor: Actor | TokenActor | None = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        manifest, state = self.manifest, ", closed" if self.loaded.closed else ""
        ks = ", ".join(map(str, manifest.variants)) or "none"
        device = f"{self.backend.device} in {self.backend.compute}"
        return f"<vtx.Model {manifest.model.name}, {manifest.precision} weights, K {ks}, on {device}{state}>"

    def close(self) -> None:
        """End running answers and free the engine; the model cannot be used afterwards. Closing twice does nothing."""
        self.loaded.close()

    def open(
        self, images: Images = (), *, system: str | None = None, fit: str | None = None,
        prefix_file: str | os.PathLike[str] | None = None,
    ) -> Conversation:  # fmt: skip
        """Open one image or video, several, or none, for questions about them.

        Args:
            images: a path, a data URL, bytes, an open file, a PIL image or an array of uint8 ([height, width, 3] RGB,
                `vtx.bgr(array)` BGR, [height, width] grey); or a list of these. A video is the path or the bytes of
                its file, an array [frames, height, width, 3], or `vtx.video` of these.
            system: a system prompt, which precedes every question.
            fit: the treatment of images of another shape than the model's: "crop", "pad" or "squash"; when left out,
                the value that `load` was given, else that of the checkpoint's image processor.
            prefix_file: a file for what the caches hold of the prompt before the last image, such as a system prompt
                and images to compare with, so that another process need not compute it. It is written after the first
                answer, also if it is of another prompt; take one only from where you would take a bundle. Where bundles
                must be signed, one without a signature by the same key, PATH.sig, is not used, and none is written.

        If the chat template prints images before videos, they are in that order.

        Raises:
            ImageError: an image or video cannot be read or is beyond the limits.
            RequestError: the chat template has no place for a system prompt, the model takes no videos, or a
                `prefix_file` serves no prompt of it.

        """
        self.loaded.check_open()
        file = None if prefix_file is None else Path(prefix_file)
        conversation = Conversation(
            self.loaded, self.loaded.prepare_all(as_list(images), fit), system, prefix_file=file
        )
        if system is not None:
            self.loaded.check_system(conversation.opening("?"))
        return conversation

    def act(
        self, images: Cameras, instruction: str, state: ArrayLike | None = None, *, k: K = DEFAULT,
        noise: ArrayLike | None = None, seed: int | None = None, steps: int | None = None, normalized: bool = False,
        deadline_ms: float | None = None, unnorm_key: str | None = None, reduce: str | None = DEFAULT,
    ) -> NDArray[np.float32]:  # fmt: skip
        """The next actions of a robot, [horizon, numbers of an action] float32, of a model that answers with actions.

        A model with an expert (pi0) makes them of pictures, an instruction, the state and noise; a model whose tokens
        are actions (OpenVLA) of one picture and an instruction, and its horizon is 1.

        Args:
            images: the pictures of the cameras, as `open` takes them, in the order of training, or by the names that
                the bundle was exported with. One that has not changed since the last call keeps its tokens.
            instruction: what to do, in words.
            state: the robot's state, in its own units; only for a model with an expert, as are `noise`, `seed` and
                `steps`.
            k: the first layer without image tokens, for the prompt and the expert, or None; the bundle's default.
            noise: [horizon, width] from which the actions are made; drawn when left out.
            seed: draws the same noise again.
            steps: Euler steps from noise to actions, 1 to 1000; when left out, the checkpoint's number. Fewer take less
                time and give other actions, which nobody has judged but by your own measurement.
            normalized: `state` is normalised, and so are the actions; both have the model's full widths.
            deadline_ms: milliseconds from the call to the actions, waiting for another thread's included. It is looked
                at before the tower, each stage of the decoder and each step of the expert, and after the last step.
                Once it has passed a `DeadlineError` is raised: actions are whole and in time, or there are none. The
                tokens of pictures and K and V of the prompt that are there by then are kept for the next call.
            unnorm_key: of a model whose tokens are actions, the data set whose units the actions are in; it may be left
                out if the checkpoint has the statistics of one.
            reduce: of such a model, a spec of reductions, as `ask` takes it.

        Raises:
            DeadlineError: the deadline has passed.
            RequestError: other cameras, a state or noise of another shape or with NaN, no statistics in the bundle or
                another name of them, what this model does not read, or a model that answers in words.
            ContextError: the pictures and the instruction do not fit.
            BundleError: the actions are not numbers, or an answer of tokens ended too early; nothing is given out.

        """
        return self.actor.act(
            images, instruction, state, k=k, noise=noise, seed=seed, steps=steps, normalized=normalized,
            deadline_ms=deadline_ms, unnorm_key=unnorm_key, reduce=reduce,
        )  # fmt: skip

    @property
    def actor(self) -> Actor | TokenActor:
        """The actor that `act` uses, with the seconds of its last actions, and the number of new pictures."""
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
        """Answer a list of messages, images among them, as OpenAI's and Hugging Face's libraries write them.

            model.generate([{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,..."}},
                {"type": "text", "text": "What is on the table?"}]}])

        Images are data URLs, paths, bytes, arrays or PIL images; nothing is downloaded. Each call starts afresh: to
        ask several questions about an image, `open` it. With `tools` the answer has `tool_calls`; their results are
        messages {"role": "tool", "tool_call_id": ..., "content": ...} after the assistant's with its `tool_calls`.

        Raises:
            RequestError: messages of another form, or that do not end with a question.
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
        """As `generate`, giving the text piece by piece."""
        from vtx.runtime.api.messages import split_images

        images, turns = split_images(messages)
        if not turns or turns[-1]["role"] not in ("user", "tool"):
            raise RequestError(
                "the last message must be the user's question or a tool's result: a dict with role 'user' or 'tool'"
            )
        self.loaded.check_system(turns)
        conversation = Conversation(self.loaded, self.loaded.prepare_all(images, messages=turns))
        return conversation.stream_messages(turns, Settings.of(k, options, keywords))

    async def agenerate(
        self,
        messages: Sequence[Mapping[str, Any]],
        k: K = DEFAULT,
        options: Options | None = None,
        **keywords: Unpack[QuestionKeywords],
    ) -> Answer:
        """As `generate`, in a thread of the event loop's executor. Cancelling the task cancels the answer."""
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
        """Answer many (image, question) pairs, `threads` of them at a time, in their order.

        Items are read as they are needed, so they may come from a generator. The first error ends the batch; leaving
        the loop early cancels the running answers.

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
