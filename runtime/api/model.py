"""The Python API: load a bundle, open images, ask.

model = vtx.load("bundle/")
with model.open("image.jpg") as image:
    for piece in image.stream("What is on the table?", k=16):
        print(piece, end="")
    answer = image.ask("What colour is it?")   # the image's part of the caches is reused
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import cast

from vtx.runtime.api.answer import Answer, AnswerStream, Clock, Options, Stats
from vtx.runtime.backends.backend import Backend
from vtx.runtime.backends.devices import AUTO, GPU_DEVICES, choose, float_bytes, open_backend
from vtx.runtime.backends.memory import EXPANDED, needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.manifest import Manifest
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.policies import to_spec
from vtx.runtime.policies.make import decisions, make_policy
from vtx.runtime.policies.policy import Policy
from vtx.runtime.prompt.text import Message, Part, Text
from vtx.runtime.session.encoded_images import EncodedImages, PreparedImage
from vtx.runtime.session.generate import generate
from vtx.runtime.session.reduction_report import reduced
from vtx.runtime.session.sampling import Sampler
from vtx.runtime.session.session import PrefillResult, Prompt, Selection, Session
from vtx.runtime.units import size
from vtx.runtime.vision.image import ImageSource, load_image
from vtx.runtime.vision.preprocess import preprocess

K = int | str | None
DEFAULT = "default"


class Model:
    """A loaded bundle. One model serves any number of conversations and threads. `why` says why on this device."""

    def __init__(self, bundle: Bundle, backend: Backend, load_ms: float, why: str = "asked for") -> None:
        self.bundle, self.backend, self.load_ms, self.why = bundle, backend, load_ms, why
        self.text = Text.load(bundle.read, bundle.manifest.text)

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    def open(self, images: ImageSource | Sequence[ImageSource] = ()) -> Conversation:
        """Open one image, several, or none, for questions about them.

        Raises:
            ImageError: an image cannot be read or is beyond the limits.

        """
        many = cast(Sequence[ImageSource], images if isinstance(images, list | tuple) else [images])
        return Conversation(self, tuple(self.prepare(source) for source in many))

    def ask(self, question: str, k: K = DEFAULT, options: Options | None = None) -> Answer:
        """Answer a question without an image."""
        with self.open() as conversation:
            return conversation.ask(question, k, options)

    def policy(self, k: K = DEFAULT, options: Options | None = None, reduce: str | None = DEFAULT) -> Policy:
        """What `k` and `reduce` mean for this bundle; its defaults where they are left out."""
        manifest = self.manifest
        depth = manifest.default_k if k == DEFAULT else k
        wanted = next(iter(manifest.reductions), None) if reduce == DEFAULT else reduce
        threshold = (options or Options()).gate_threshold
        return make_policy(depth, manifest, self.backend.gate, threshold, reduce=wanted, dialect=self.backend.dialect)

    def prepare(self, source: ImageSource) -> PreparedImage:
        """Read and preprocess an image."""
        pixels = preprocess(load_image(source), self.manifest.image)
        return PreparedImage(pixels, hashlib.sha256(pixels.tobytes()).hexdigest())


class Conversation:
    """Questions about the same images. The images' part of the caches is computed once and reused.

    `ask` and `stream` put independent questions; `chat` starts a conversation that remembers its turns.
    Calls from several threads wait for each other.
    """

    def __init__(self, model: Model, images: tuple[PreparedImage, ...]) -> None:
        self.model, self.images = model, images
        self._session = Session(model.backend, model.manifest)
        self._encoded = EncodedImages(model.backend, images)
        self._lock = threading.Lock()
        self._reading: tuple[int, weakref.ref[AnswerStream]] | None = None  # thread and stream that hold the lock

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the caches. The conversation can be used again and then starts afresh."""
        self._end_own_stream()
        with self._lock:
            self._session = Session(self.model.backend, self.model.manifest)
            self._encoded = EncodedImages(self.model.backend, self.images)

    def ask(
        self, question: str, k: K = DEFAULT, options: Options | None = None, *, reduce: str | None = DEFAULT
    ) -> Answer:
        """Answer one question, independent of those before it.

        Args:
            question: plain text; special tokens in it stay text.
            k: a prebuilt K, "none" or None for no withdrawal; the bundle's default when left out.
            options: sampling and limits.
            reduce: a spec of reductions, as "mustdrop:192"; "none" or None for none; the bundle's first when left out.

        Raises:
            RequestError: an empty question, a K the bundle was not cut at, a reduction it was not exported for.
            ContextError: the question does not fit.

        """
        return self.stream(question, k, options, reduce=reduce).read()

    def stream(
        self, question: str, k: K = DEFAULT, options: Options | None = None, *, reduce: str | None = DEFAULT
    ) -> AnswerStream:
        """As `ask`, giving the text piece by piece."""
        return self._stream([self._user(question)], k, options or Options(), reduce)

    def chat(self, k: K = DEFAULT, *, reduce: str | None = DEFAULT) -> Chat:
        """A conversation of several turns about these images."""
        return Chat(self, k, reduce)

    def _user(self, question: str, *, with_images: bool = True) -> Message:
        parts: list[Part] = [{"type": "image"} for _ in self.images] if with_images else []
        return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}

    def _stream(
        self, messages: Sequence[Message], k: K, options: Options, reduce: str | None, after: Selection | None = None
    ) -> AnswerStream:
        manifest, text = self.model.manifest, self.model.text
        policy = self.model.policy(k, options, reduce)
        ids = text.prompt(messages, manifest.model.vision_tokens)  # here, so that what cannot be asked is told now

        def pieces(stream: AnswerStream) -> Generator[str]:
            self._end_own_stream()
            with self._lock:
                self._reading = threading.get_ident(), weakref.ref(stream)
                clock = Clock()
                encoders = clock.all_vision(self._encoded.encoders(policy.entries))
                prompt_ids = ids
                if policy.entries and encoders:  # how many rows an image has, only its pixels say
                    prompt_ids = text.prompt(messages, [len(encode().patches) for _, encode in encoders])
                done = self._session.prefill(
                    Prompt(prompt_ids, prompt_ids == manifest.text.image_token_id, encoders), policy, after=after
                )
                clock.prefilled()
                yield from self._generate(stream, done, len(prompt_ids), options, clock, policy)

        return AnswerStream(pieces)

    def _end_own_stream(self) -> None:
        """End an answer that this thread has begun and not read to its end: its lock would be waited for forever."""
        thread, reading = self._reading or (None, None)
        stream = reading() if reading and thread == threading.get_ident() else None
        if stream:
            with contextlib.suppress(ValueError):  # another thread is reading it just now and will end it
                stream.close()

    def _generate(
        self,
        stream: AnswerStream,
        done: PrefillResult,
        prompt_tokens: int,
        options: Options,
        clock: Clock,
        policy: Policy,
    ) -> Iterator[str]:
        text, ids = self.model.text.stream(), list[int]()
        end_ids = () if options.ignore_eos else self.model.manifest.text.end_ids
        sampler = Sampler(options.sampling)
        shown: list[str] = []
        tokens = generate(self._session, done.logits, sampler, end_ids=end_ids, max_new_tokens=options.max_new_tokens)
        for token in tokens:
            clock.token()
            ids.append(token)
            piece = text.push(token)
            if piece and not shown:
                piece = piece.lstrip()
            if piece:
                shown.append(piece)
                yield piece
        rest = text.finish() if shown else text.finish().lstrip()
        if rest:
            shown.append(rest)
            yield rest
        stopped = "end" if ids[-1] in end_ids else "length" if len(ids) == options.max_new_tokens else "context"
        stats = self._stats(done, prompt_tokens, clock, policy)
        stream._selection = done.selection
        stream._answer = Answer("".join(shown), tuple(ids), stats, stopped)

    def _stats(self, done: PrefillResult, prompt_tokens: int, clock: Clock, policy: Policy) -> Stats:
        manifest, gate = self.model.manifest, decisions(policy)
        return Stats(
            k=done.k,
            full_layers=done.k - 1 if done.k else manifest.model.layers,
            exit_layer=done.k - 1 if done.k else None,
            prompt_tokens=prompt_tokens,
            vision_tokens=done.vision_tokens,
            vision_tokens_kept=done.vision_kept,
            kv_slots=done.slots,
            kv_bytes=sum(done.slots) * self.model.backend.kv_slot_bytes,
            reused_image=done.reused_image,
            device=self.model.backend.device,
            compute=self.model.backend.compute,
            precision=manifest.precision,
            timings_ms={"load": round(self.model.load_ms, 3), **clock.timings()},
            gate=None if gate is None else tuple(gate),
            reduce=to_spec(policy.reductions),
            reduced=reduced(policy, done),
        )


class Chat:
    """Turns that build on each other; K, and which vision rows stay, are the first turn's."""

    def __init__(self, conversation: Conversation, k: K, reduce: str | None) -> None:
        self._conversation, self._k, self._reduce = conversation, k, reduce
        self.messages: list[Message] = []
        self._selection: Selection | None = None  # the question by which the vision rows of this chat were chosen

    def ask(self, question: str, options: Options | None = None) -> Answer:
        """Answer the next turn; the turns before it are part of the prompt."""
        return self.stream(question, options).read()

    def stream(self, question: str, options: Options | None = None) -> AnswerStream:
        """As `ask`, giving the text piece by piece. The turn counts once it has been read to its end."""
        turn = self._conversation._user(question, with_images=not self.messages)
        messages, limits = [*self.messages, turn], options or Options()
        inner = self._conversation._stream(messages, self._k, limits, self._reduce, self._selection)

        def pieces(stream: AnswerStream) -> Generator[str]:
            yield from inner
            stream._answer, self._selection = inner.answer, inner._selection
            self.messages += [turn, {"role": "assistant", "content": [{"type": "text", "text": inner.answer.text}]}]

        return AnswerStream(pieces)


def load(
    bundle: str | os.PathLike[str],
    *,
    device: str = AUTO,
    compute: str | None = None,
    threads: int | None = None,
    force: bool = False,
) -> Model:
    """Load a bundle that `vtx-export` made.

    Args:
        bundle: its directory.
        device: "cpu" (onnxruntime), "openvino", "cuda" (onnxruntime), "tensorrt" (engines of vtx-build), or "auto" for
            the best of those that are possible here.
        compute: type of the arithmetic, "f32" (also when left out) or, on OpenVINO, "bf16".
        threads: threads of the one pool that all models of this process share; all cores when left out.
        force: load also where the memory that is free looks too small for the weights.

    Raises:
        BundleError: no bundle, or a damaged one.
        DeviceError: the device, its package, its graphs or its arithmetic are not there, or the memory is too small.

    """
    start = time.perf_counter()
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}; give a number from 1 on")
    opened = Bundle.open(bundle)
    place = choose(opened, device, compute)
    if not force and place.device not in GPU_DEVICES:
        _check_memory(opened, float_bytes(place))
    backend = open_backend(opened, place, threads)
    return Model(opened, backend, 1000 * (time.perf_counter() - start), place.why)


def _check_memory(bundle: Bundle, floats: Mapping[str, int]) -> None:
    """Raise DeviceError when the weights, whose floats take so many bytes, and an answer exceed the free memory."""
    needed, free = needed_memory(bundle, floats), available_memory()
    if free is not None and needed > free:
        where = "onnxruntime, which expands fp16 and bf16 to float32" if floats is EXPANDED else "OpenVINO"
        raise DeviceError(
            f"{bundle.manifest.model.name} needs about {size(needed)} of memory on {where}; {size(free)} is free; "
            "use a machine with more, or export with --precision int4 (--force tries all the same)"
        )
