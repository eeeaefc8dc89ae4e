"""The images of a conversation, encoded once for each set of extra inputs, and which of their tokens enter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Entry, PromptText
from vtx.runtime.session.image_cache import ImageCache, nbytes
from vtx.runtime.session.prefix import ImageEncoders
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, ImageTokens, PromptImage

MAX_SETS = 4  # of extra inputs, of which the image tokens are kept; beyond these the oldest go
Check = Callable[[], None]
ExtrasKey = tuple[tuple[str, bytes], ...]


def _never() -> None:
    """A check that lets everything pass."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One preprocessed image: its `views` [views, 3, height, width] float32, a hash of them, and its form in a prompt.

    `size` is its width and height before that; `arrange` makes the image's tokens from those of its views. A video is
    one too, of the `kind` "video": each frame is a view, and `size` that of the first.
    """

    views: NDArray[np.float32]
    key: str
    in_prompt: PromptImage
    size: tuple[int, int]
    arrange: Callable[[Sequence[ImageTokens]], ImageTokens]
    kind: Literal["image", "video"] = "image"

    @property
    def tokens(self) -> int:
        """Its number of tokens."""
        return self.in_prompt.tokens

    @property
    def pixels(self) -> NDArray[np.float32]:
        """The first view, [3, height, width] float32, which shows the whole image."""
        first: NDArray[np.float32] = self.views[0]
        return first

    def encode(self, backend: Backend, extras: Extras = NO_EXTRAS, check: Check = _never) -> ImageTokens:
        """The image's tokens, from one pass of the tower a view; `check` is called before each and may raise."""
        assert not extras or self.kind == "image", "policies that need extra inputs are refused for videos"
        views = list[ImageTokens]()
        for view in self.views:
            check()
            views.append(backend.video(view[None]) if self.kind == "video" else backend.vision(view[None], extras))
        return self.arrange(views)


def vision_extras(entries: Sequence[Entry]) -> Extras:
    """The extra inputs of the vision graph that `entries` ask for, by name, [1] float32 each."""
    values = {name: value for entry in entries for name, value in entry.vision_inputs().items()}
    return {name: np.array([value], np.float32) for name, value in values.items()}


def enter(tokens: ImageTokens, entries: Sequence[Entry], question: PromptText | None) -> ImageTokens:
    """What of an image's tokens enters the decoder."""
    for entry in entries:
        selected = entry.select(tokens, question)
        if selected is not None:
            tokens = tokens.take(selected, keep_positions=entry.keeps_positions)
    return tokens


@dataclass(slots=True)
class EncodedImages:
    """The tokens of `images` by the vision graph's extra inputs. Its owner locks it."""

    backend: Backend
    images: tuple[PreparedImage, ...]
    shared: ImageCache | None = None
    _encoded: dict[ExtrasKey, dict[str, ImageTokens]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of pixels and encoded images. What is shared counts for each that holds it."""
        encoded = sum(nbytes(tokens) for images in self._encoded.values() for tokens in images.values())
        return encoded + sum(image.views.nbytes for image in self.images)

    def encoders(
        self, entries: Sequence[Entry], question: PromptText | None = None, check: Check = _never
    ) -> ImageEncoders:
        """For each image a key that stands for its tokens, and the call that gives them.

        `question` is what entries that use it select by. `check` is called before every view of an image and may
        raise, to stop there.
        """
        settings = "".join(f" {entry!r}" for entry in entries)
        if question is not None and any(entry.uses_question for entry in entries):
            settings += f" {question.key}"
        return tuple(
            (image.key + settings, cache(partial(self._enter, image, entries, question, check)))
            for image in self.images
        )

    def _enter(
        self, image: PreparedImage, entries: Sequence[Entry], question: PromptText | None, check: Check
    ) -> ImageTokens:
        return enter(self._encode(image, vision_extras(entries), check), entries, question)

    def _encode(self, image: PreparedImage, extras: Extras, check: Check) -> ImageTokens:
        key = tuple((name, value.tobytes()) for name, value in sorted(extras.items()))
        encoded = self._encoded.get(key, {})
        if image.key not in encoded:
            tokens = self._shared(image, extras, key, check)
            encoded = {**encoded, image.key: tokens}
            self._encoded = dict(list({**self._encoded, key: encoded}.items())[-MAX_SETS:])
        return encoded[image.key]

    def _shared(self, image: PreparedImage, extras: Extras, key: ExtrasKey, check: Check) -> ImageTokens:
        if self.shared is None:
            return self._run(image, extras, check)
        tokens = self.shared.get((image.key, key))
        if tokens is None:
            tokens = self._run(image, extras, check)
            self.shared.put((image.key, key), tokens)
        return tokens

    def _run(self, image: PreparedImage, extras: Extras, check: Check) -> ImageTokens:
        tokens = image.encode(self.backend, extras, check)
        if not all(np.isfinite(signal).all() for signal in tokens.patches.signals.values()):
            raise BundleError("what the tower says of an image is not a number; use --reduce none, or export at fp32")
        return tokens
