"""A loaded bundle as conversations and the server need it: its text, its images, its policies."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.accepting import CARD
from vtx.runtime.api.boxes import check_boxes
from vtx.runtime.api.images import ImageOptions, ImagePreparer
from vtx.runtime.api.options import DEFAULT, K, Options
from vtx.runtime.api.prompts import Prompter
from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.tensors import read_final_norm
from vtx.runtime.errors import ModelClosedError, RequestError
from vtx.runtime.policies import to_spec
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import PolicySettings, check_layout, check_videos, make_policy, read_rest
from vtx.runtime.policies.methods.withdraw import Rest
from vtx.runtime.prompt.text import Text, text_files
from vtx.runtime.session.encoded_images import ImageCaches, PreparedImage

if TYPE_CHECKING:
    from vtx.runtime.bundle.card import Card

log = logging.getLogger(__name__)
DEFAULT_IMAGES = ImageOptions()


class Closable(Protocol):
    """A conversation, as the bundle sees it that it uses."""

    def close(self) -> None:
        """End a running answer and free the caches."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """K and reductions of questions that name none, and the rest that goes with that K."""

    k: K
    reduce: str | None
    rest: str | int | None = None

    @classmethod
    def of(cls, manifest: Manifest, card: Card | None) -> Defaults:
        """Those of the card in use, else the bundle's."""
        if card is None:
            return cls(manifest.default_k, next(iter(manifest.reductions), None))
        configuration = card.chosen.configuration
        return cls(configuration.k, configuration.reduce, configuration.rest)


class Conversations:
    """The conversations that use a bundle, which are closed with it. `begin` is called before the first.

    Safe for many threads.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self.closed = False
        self._begin = begin
        self._begun = False
        self._all: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._lock = threading.Lock()

    def check_open(self) -> None:
        """Raise ModelClosedError if the bundle was closed."""
        if self.closed:
            raise ModelClosedError("the model is closed; load it again with vtx.load")

    def add(self, conversation: Closable) -> None:
        """Close a conversation with the bundle. Raises ModelClosedError if it was closed."""
        with self._lock:
            self.check_open()
            if not self._begun:
                self._begin()
                self._begun = True
            self._all.add(conversation)

    def close(self) -> bool:
        """Close all; False if they were closed before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            conversations = list(self._all)
        for conversation in conversations:
            conversation.close()
        return True


class LoadedBundle:
    """A bundle on an engine: it prepares images, prompts and policies. Safe for many threads.

    `why` is the reason for this device, `card` the one whose settings are the defaults.
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
        manifest = bundle.manifest
        self.bundle = bundle
        self.backend = backend
        self.load_ms = load_ms
        self.why = why
        self.card = card
        self.defaults = Defaults.of(manifest, card)
        if card is not None and images.fit != "released" and images.max_tiles is None and images.max_pixels is None:
            configuration = card.chosen.configuration
            images = replace(images, max_tiles=configuration.max_tiles, max_pixels=configuration.max_pixels)
        self.text = Text(
            *text_files(bundle.read),
            manifest.text,
            max_context=manifest.max_context,
            or_more_context=manifest.or_more_context,
            vocab=max(manifest.model.vocab, manifest.text.image_token_id + 1),  # which may be in no table
        )
        self.caches = ImageCaches()
        self.images = ImagePreparer(bundle, self.text, images, self.caches)
        self.prompts = Prompter(bundle, backend, self.text)
        self.conversations = Conversations(bundle.note_release)
        self._final_norm = read_final_norm(bundle) if manifest.text.seg_token_id is not None else None

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    def close(self) -> None:
        """End running answers and free the engine. Closing twice does nothing."""
        if self.conversations.close():
            self.backend.close()
            log.info("closed %s", self.bundle.folder)

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
        settings = PolicySettings(options.gate_threshold, rest, self.defaults.reduce if reduce == DEFAULT else reduce)
        policy = make_policy(
            k,
            manifest,
            self.backend.gate,
            settings,
            dialect=self.backend.dialect,
            final_norm=lambda: read_final_norm(self.bundle),
        )
        if policy.reductions:
            check_layout(policy.reductions, self.images.layout)
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
            k = self.defaults.k
            rest = self.defaults.rest if rest is None else rest
        return k, None if rest is None else read_rest(rest)

    def normed(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """The hidden state [hidden] of the last layer after the decoder's final norm."""
        assert self._final_norm is not None, "bundles with a segmentation token have the norm's weight"
        scale = np.float32(math.sqrt(float(np.square(state).mean()) + self.manifest.model.eps))
        return state / scale * self._final_norm
