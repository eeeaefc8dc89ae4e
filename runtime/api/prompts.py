"""Prompts of a loaded bundle: messages and their token ids, and what else is made of a question's text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.options import Options
from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.messages import Message, Part, asked_text, thinking_of
from vtx.runtime.prompt.text import Text
from vtx.runtime.session.encoded_images import PreparedImage

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import Grammars, Guide, GuidedAnswer
    from vtx.runtime.prompt.text_tower import TextTower


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


class Prompter:
    """Prompts of a bundle's `text`. Its text tower and compiled forms are made when first needed.

    Safe for many threads.
    """

    def __init__(self, bundle: Bundle, backend: Backend, text: Text) -> None:
        self._bundle = bundle
        self._backend = backend
        self._text = text
        self._text_tower: TextTower | None = None
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()

    def ids(self, messages: Sequence[Message], images: Sequence[PreparedImage] = ()) -> NDArray[np.int64]:
        """Token ids of messages, with all tokens of each image, or one for each if no images are given.

        Raises RequestError: they cannot be asked.
        """
        return self._text.asked(messages, [image.in_prompt for image in images] or 1)

    def check_system(self, messages: Sequence[Message]) -> None:
        """Raise RequestError if the chat template silently drops a system prompt."""
        others = [message for message in messages if message["role"] != "system"]
        if len(others) < len(messages) and np.array_equal(self.ids(messages), self.ids(others)):
            raise RequestError(
                "this model's chat template has no place for a system prompt; leave it out, "
                "or export with a --chat-template that prints it"
            )

    def check_thinking(self, messages: Sequence[Message], options: Options) -> None:
        """Raise RequestError for thoughts that are switched on or off, or limited, if the chat template has no way to.

        They may be switched off where there are none.
        """
        thinking = thinking_of(messages)
        if (thinking or (thinking is False and self._text.thought_form)) and not self._text.switches_thinking:
            raise RequestError(
                "this model's chat template has no switch for thoughts (enable_thinking); leave thinking out"
            )
        if options.max_thinking_tokens is not None and self._text.thought_form is None:
            raise RequestError("this model's chat template has no marks of thoughts; leave max_thinking_tokens out")
        if thinking and messages[-1]["role"] == "assistant":
            raise RequestError("the answer begins with text, before which no thought has a place; leave thinking out")

    def embed_question(self, messages: Sequence[Message]) -> NDArray[np.float32]:
        """The embeddings [segments, width] of the question about the last image, by the bundle's text tower."""
        spec = self._bundle.manifest.text_tower
        assert spec is not None, "policies that need a text tower are refused if there is none"
        if self._text_tower is None:
            from vtx.runtime.prompt.text_tower import TextTower

            self._text_tower = TextTower(self._bundle.read, spec, self._backend.text_tower)
        return self._text_tower.embed(asked_text(messages))

    def guided(self, guide: Guide) -> GuidedAnswer:
        """A new answer in a form; compiled forms are kept.

        Raises DeviceError: llguidance is not installed; RequestError: the form cannot be compiled or allows no answer,
        or llguidance does not read the tokenizer.
        """
        with self._lock:
            if self._grammars is None:
                from vtx.runtime.prompt.guiding import Grammars

                self._grammars = Grammars(self._text, self._bundle.manifest.model.vocab)
        return self._grammars.start(guide)
