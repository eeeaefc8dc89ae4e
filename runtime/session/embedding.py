"""The tokens of prompts and answers before the decoder: text embedded, images encoded, and the inputs of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.session.prefix import Check, Key, Prefix, Prompt, assign_positions
from vtx.runtime.vision.tokens import Ids, TokenStates


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embeds the tokens of a bundle. Tokens of a group see each other: a whole prompt, or image tokens side by side."""

    backend: Backend
    manifest: Manifest

    @property
    def two_way(self) -> bool:
        """True if all tokens of a prompt see each other."""
        return self.manifest.model.two_way == "prompt"

    @property
    def grouped(self) -> bool:
        """True if there are groups of tokens."""
        return self.manifest.model.two_way is not None

    def text(self, ids: Ids, *, of_prompt: bool = False) -> TokenStates:
        """Text tokens [n] before the decoder, with zeros for the inputs that the embed graph does not give.

        `of_prompt`: they belong to a prompt, not to an answer.
        """
        tokens = self.backend.embed(ids)
        token_inputs = self.manifest.token_inputs
        if not token_inputs and not self.grouped:
            return tokens
        missing = [declared for declared in token_inputs if not declared.of_text]
        inputs = {declared.name: np.zeros((len(tokens), declared.width), np.float32) for declared in missing}
        if self.grouped:
            inputs[names.GROUP] = np.full((len(tokens), 1), 0 if of_prompt and self.two_way else -1, np.float32)
        return TokenStates(tokens.hidden, {**tokens.inputs, **inputs})

    def prefix(self, prompt: Prompt, key: Key, check: Check) -> Prefix:
        """A prompt's prefix; `check` is called before each of its images is encoded."""
        length = prompt.prefix_length
        if not length:
            return Prefix.empty(key, self.manifest.model.hidden)
        is_vision = prompt.is_vision[:length]
        embedded = self.text(prompt.ids[:length], of_prompt=True)
        images = []
        for _, encode in prompt.encoders:
            check()
            images.append(encode())
        hidden = embedded.hidden
        inputs = embedded.inputs
        hidden[is_vision] = np.concatenate([image.hidden for image in images])
        for declared in self.manifest.token_inputs:
            if declared.of_images:
                signals = [image.patches.signals[names.token_input(declared.name)] for image in images]
                inputs[declared.name][is_vision] = np.concatenate(signals)
        if self.grouped and not self.two_way:  # image tokens that follow each other are one
            first = is_vision & ~np.concatenate([[False], is_vision[:-1]])
            inputs[names.GROUP][is_vision, 0] = np.cumsum(first)[is_vision]
        positions, following = assign_positions(is_vision, images)
        patches = tuple(image.patches for image in images)
        return Prefix(key, is_vision, patches, positions, following, hidden, inputs)
