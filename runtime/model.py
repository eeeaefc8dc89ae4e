"""The Python API: load a bundle, open images, ask.

model = vtx.load("bundle/")
with model.open("image.jpg") as image:
for piece in image.stream("What is on the table?", k=16):
print(piece, end="")
answer = image.ask("What colour is it?")   # the image's part of the caches is reused
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backend import Backend, Rows
from vtx.runtime.bundle import Bundle
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.generate import generate
from vtx.runtime.image import ImageSource, load_image, preprocess
from vtx.runtime.machine import available_memory
from vtx.runtime.manifest import WEIGHT_BYTES, Manifest
from vtx.runtime.policy import Decision, Gate, make_policy
from vtx.runtime.sampling import Sampler, Sampling
from vtx.runtime.session import Prefilled, Prompt, Session
from vtx.runtime.text import Message, Part, Text
from vtx.runtime.units import size

K = int | str | None
DEFAULT = "default"
DEVICES = ("auto", "cpu")


@dataclass(frozen=True, slots=True)
class Stats:
    """What an answer cost. Per-layer lists start with layer 1; times are milliseconds.

    `k` is the first layer without vision rows and None where they stayed; `exit_layer` is the last layer
    with them, None likewise. `kv_slots` and `kv_bytes` count filled slots right after the prompt.
    `timings_ms.first_token` runs from the question to the first token, vision and prefill included.
    `gate` holds the decisions of the gates, in the order they were asked, where K was "auto"; else None.
    """

    k: int | None
    full_layers: int
    exit_layer: int | None
    prompt_tokens: int
    vision_tokens: int
    vision_tokens_kept: tuple[int, ...]
    kv_slots: tuple[int, ...]
    kv_bytes: int
    reused_image: bool
    device: str
    precision: str
    timings_ms: dict[str, float]
    gate: tuple[Decision, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text, its token ids (an end token included), its cost, and why it ended.

    `stopped` is "end" (an end token), "length" (`max_new_tokens`) or "context" (no KV slot left).
    """

    text: str
    token_ids: tuple[int, ...]
    stats: Stats
    stopped: str

    def to_dict(self) -> dict[str, Any]:
        """The object that `vtx-run --json` prints."""
        facts = {"text": self.text, "token_ids": self.token_ids, **dataclasses.asdict(self.stats)}
        return facts if facts["gate"] is not None else {k: v for k, v in facts.items() if k != "gate"}


@dataclass(frozen=True, slots=True)
class Options:
    """Limits and sampling of one answer."""

    max_new_tokens: int = 256
    ignore_eos: bool = False
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    gate_threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; give a number from 1 on")


class AnswerStream:
    """An iterator over pieces of text as they come; `answer` is there when it is exhausted.

    It ends early when the same thread puts the next question before this one has been read to its end.
    """

    def __init__(self, pieces: Callable[[AnswerStream], Generator[str]]) -> None:
        self._answer: Answer | None = None
        self._pieces = pieces(self)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        if self._answer is None:
            raise RequestError("the answer is not complete; read its stream to the end, before the next question")
        return self._answer

    def close(self) -> None:
        """Stop here; the answer stays incomplete."""
        self._pieces.close()

    def read(self) -> Answer:
        """Run to the end and return the answer."""
        for _ in self._pieces:
            pass
        return self.answer


@dataclass(frozen=True, slots=True)
class Picture:
    """One preprocessed image: [3, height, width] float32 and the hash of these pixels."""

    pixels: NDArray[np.float32]
    key: str


class Model:
    """A loaded bundle. One model serves any number of conversations and threads."""

    def __init__(self, bundle: Bundle, backend: Backend, load_ms: float) -> None:
        self.bundle, self.backend, self.load_ms = bundle, backend, load_ms
        self.text = Text.load(bundle.folder, bundle.manifest.text)

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    def open(self, images: ImageSource | Sequence[ImageSource] = ()) -> Conversation:
        """Open one image, several, or none, for questions about them.

        Raises:
            ImageError: an image cannot be read or is beyond the limits.

        """
        many = cast(Sequence[ImageSource], images if isinstance(images, list | tuple) else [images])
        return Conversation(self, tuple(self.picture(source) for source in many))

    def ask(self, question: str, k: K = DEFAULT, options: Options | None = None) -> Answer:
        """Answer a question without an image."""
        with self.open() as conversation:
            return conversation.ask(question, k, options)

    def picture(self, source: ImageSource) -> Picture:
        """Read and preprocess an image."""
        pixels = preprocess(load_image(source), self.manifest.image)
        return Picture(pixels, hashlib.sha256(pixels.tobytes()).hexdigest())


class Conversation:
    """Questions about the same images. The images' part of the caches is computed once and reused.

    `ask` and `stream` put independent questions; `chat` starts a conversation that remembers its turns.
    Calls from several threads wait for each other.
    """

    def __init__(self, model: Model, pictures: tuple[Picture, ...]) -> None:
        self._model, self._pictures = model, pictures
        self._session = Session(model.backend, model.manifest)
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
            self._session = Session(self._model.backend, self._model.manifest)

    def ask(self, question: str, k: K = DEFAULT, options: Options | None = None) -> Answer:
        """Answer one question, independent of those before it.

        Args:
            question: plain text; special tokens in it stay text.
            k: a prebuilt K, "none" or None for no withdrawal; the bundle's default when left out.
            options: sampling and limits.

        Raises:
            RequestError: an empty question, or a K the bundle was not cut at.
            ContextError: the question does not fit.

        """
        return self.stream(question, k, options).read()

    def stream(self, question: str, k: K = DEFAULT, options: Options | None = None) -> AnswerStream:
        """As `ask`, giving the text piece by piece."""
        return self._stream([self._user(question)], k, options or Options(), go_on=False)

    def chat(self, k: K = DEFAULT) -> Chat:
        """A conversation of several turns about these images."""
        return Chat(self, k)

    def _user(self, question: str, *, with_images: bool = True) -> Message:
        parts: list[Part] = [{"type": "image"} for _ in self._pictures] if with_images else []
        return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}

    def _stream(self, messages: Sequence[Message], k: K, options: Options, *, go_on: bool) -> AnswerStream:
        manifest = self._model.manifest
        chosen = manifest.default_k if k == DEFAULT else k
        policy = make_policy(chosen, manifest, self._model.backend.gate, options.gate_threshold)
        ids = self._model.text.prompt(messages, manifest.model.vision_tokens)

        def pieces(stream: AnswerStream) -> Generator[str]:
            self._end_own_stream()
            with self._lock:
                self._reading = threading.get_ident(), weakref.ref(stream)
                clock = _Clock()
                pictures = tuple((p.key, lambda p=p: clock.vision(self._encode, p)) for p in self._pictures)
                prompt = Prompt(ids, ids == manifest.text.image_token_id, pictures)
                done = self._session.prefill(prompt, policy, go_on=go_on)
                clock.prefilled()
                gate = policy.asked if isinstance(policy, Gate) else None
                yield from self._generate(stream, done, len(ids), options, clock, gate)

        return AnswerStream(pieces)

    def _end_own_stream(self) -> None:
        """End an answer that this thread has begun and not read to its end: its lock would be waited for forever."""
        thread, reading = self._reading or (None, None)
        stream = reading() if reading and thread == threading.get_ident() else None
        if stream:
            with contextlib.suppress(ValueError):  # another thread is reading it just now and will end it
                stream.close()

    def _encode(self, picture: Picture) -> Rows:
        return self._model.backend.vision(picture.pixels[None])

    def _generate(
        self,
        stream: AnswerStream,
        done: Prefilled,
        prompt_tokens: int,
        options: Options,
        clock: _Clock,
        gate: list[Decision] | None,
    ) -> Iterator[str]:
        text, ids = self._model.text.stream(), list[int]()
        end_ids = () if options.ignore_eos else self._model.manifest.text.end_ids
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
        stats = self._stats(done, prompt_tokens, clock, gate)
        stream._answer = Answer("".join(shown), tuple(ids), stats, stopped)

    def _stats(self, done: Prefilled, prompt_tokens: int, clock: _Clock, gate: list[Decision] | None) -> Stats:
        manifest = self._model.manifest
        return Stats(
            k=done.k,
            full_layers=done.k - 1 if done.k else manifest.model.layers,
            exit_layer=done.k - 1 if done.k else None,
            prompt_tokens=prompt_tokens,
            vision_tokens=done.vision_tokens,
            vision_tokens_kept=done.vision_kept,
            kv_slots=done.slots,
            kv_bytes=sum(done.slots) * manifest.kv_slot_bytes(),
            reused_image=done.reused_image,
            device=self._model.backend.device,
            precision=manifest.precision,
            timings_ms={"load": round(self._model.load_ms, 3), **clock.timings()},
            gate=None if gate is None else tuple(gate),
        )


class Chat:
    """Turns that build on each other; K stays the same from the first turn on."""

    def __init__(self, conversation: Conversation, k: K) -> None:
        self._conversation, self._k = conversation, k
        self.messages: list[Message] = []

    def ask(self, question: str, options: Options | None = None) -> Answer:
        """Answer the next turn; the turns before it are part of the prompt."""
        return self.stream(question, options).read()

    def stream(self, question: str, options: Options | None = None) -> AnswerStream:
        """As `ask`, giving the text piece by piece. The turn counts once it has been read to its end."""
        turn = self._conversation._user(question, with_images=not self.messages)
        inner = self._conversation._stream([*self.messages, turn], self._k, options or Options(), go_on=True)

        def pieces(stream: AnswerStream) -> Generator[str]:
            yield from inner
            stream._answer = inner.answer
            self.messages += [turn, {"role": "assistant", "content": [{"type": "text", "text": inner.answer.text}]}]

        return AnswerStream(pieces)


class _Clock:
    """Milliseconds of the parts of one answer."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._vision = 0.0
        self._prefilled = self._first = self._last = self._start
        self._tokens = 0

    def vision(self, encode: Callable[[Picture], Rows], picture: Picture) -> Rows:
        start = time.perf_counter()
        rows = encode(picture)
        self._vision += time.perf_counter() - start
        return rows

    def prefilled(self) -> None:
        self._prefilled = time.perf_counter()

    def token(self) -> None:
        self._last = time.perf_counter()
        self._first = self._last if not self._tokens else self._first
        self._tokens += 1

    def timings(self) -> dict[str, float]:
        per_token = (self._last - self._first) / (self._tokens - 1) if self._tokens > 1 else 0.0
        times = {
            "vision": self._vision,
            "prefill": self._prefilled - self._start - self._vision,
            "first_token": self._first - self._start,
            "decode_per_token": per_token,
        }
        return {name: round(1000 * seconds, 3) for name, seconds in times.items()}


def load(
    bundle: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None, force: bool = False
) -> Model:
    """Load a bundle that `vtx-export` made.

    Args:
        bundle: its directory.
        device: "auto" or "cpu".
        threads: threads of the one pool that all models of this process share; all cores when left out.
        force: load also where the memory that is free looks too small for the weights.

    Raises:
        BundleError: no bundle, or a damaged one.
        DeviceError: the device is not there, onnxruntime is not installed, or the memory is too small.

    """
    start = time.perf_counter()
    if device not in DEVICES:
        raise DeviceError(f"device {device!r} is not available in this version; it runs on: {', '.join(DEVICES)}")
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}; give a number from 1 on")
    from vtx.runtime.ort import OrtBackend

    opened = Bundle.open(bundle)
    if not force:
        _check_memory(opened.manifest)
    backend = OrtBackend(opened, threads)
    return Model(opened, backend, 1000 * (time.perf_counter() - start))


def _check_memory(manifest: Manifest) -> None:
    """Raise DeviceError when the weights, expanded to float32 as a CPU needs them, exceed the free memory."""
    stored = sum(record.bytes for name, record in manifest.files.items() if name.startswith("weights/"))
    embedding = manifest.model.vocab * manifest.model.hidden  # read from its file a row at a time
    needed = stored * 4 // WEIGHT_BYTES[manifest.precision] - 4 * embedding
    free = available_memory()
    if free is not None and needed > free:
        raise DeviceError(
            f"{manifest.model.name} needs about {size(needed)} of memory on a CPU, which computes in float32; "
            f"{size(free)} is free; use a machine with more or a smaller model (--force tries all the same)"
        )
