"""A bundle on its engine, measured as `Reference` is: the same hidden states and answers, of what is deployed.

All tokens run once; from the boundary of each K on, its stages run again with the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtx.exporter.reference.model import UNWATCHED, Encoded, Sample, Watchers
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Removal
from vtx.runtime.policies.make import make_policy
from vtx.runtime.session.generate import Decoding, generate
from vtx.runtime.session.prefix import Prompt, no_check
from vtx.runtime.session.sampling import Sampler, Sampling
from vtx.runtime.session.session import Session
from vtx.runtime.vision.image import ImageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened(Encoded):
    """Images with a session of their own, whose caches keep what has run of them."""

    session: Session


class EngineReference:
    """`Reference` of a loaded bundle, at the K it was cut at and in the arithmetic of its engine."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._manifest = model.manifest
        self.backend = model.backend
        self._full = make_policy(None, model.manifest, model.backend.gate)

    def encode(self, images: Sequence[ImageSource], settings: ImageSettings) -> Encoded:
        prepared = self._model.loaded.images.prepare_all(images)
        tokens = tuple(image.encode(self.backend) for image in prepared)
        return _Opened(torch.zeros(0), tokens, session=Session(self.backend, self._manifest))

    def greedy(
        self,
        samples: Sequence[Sample],
        end_ids: Collection[int],
        max_new_tokens: int,
        report: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Each sample's greedy answer without withdrawal, up to `max_new_tokens` ids, an end token included."""
        answers = list[list[int]]()
        for sample in samples:
            session, prompt = self._prompt(sample)
            logits = session.prefill(prompt, self._full).logits
            greedy = Decoding(greedy=True)
            sampler = Sampler(Sampling())
            tokens = generate(session, logits, sampler, end_ids=end_ids, max_new_tokens=max_new_tokens, decoding=greedy)
            answers.append(list(tokens))
            report(self._manifest.model.layers)
        return answers

    def hidden(
        self,
        samples: Sequence[Sample],
        ks: Sequence[int | None],
        report: Callable[[int], None] = lambda _: None,
        watchers: Watchers = UNWATCHED,
    ) -> list[dict[int | None, Tensor]]:
        """As of `Reference`; outputs are of layers that end a stage, and of the states after the last image."""
        if watchers.attend is not None:
            raise RequestError("an engine does not give its attention; measure it without --device")
        stages = self._manifest.stages
        results = list[dict[int | None, Tensor]]()
        boundary = {stage.first: number for number, stage in enumerate(stages)}
        for number, sample in enumerate(samples):
            session, prompt = self._prompt(sample)
            caches = session.caches
            length = prompt.prefix_length
            question, answer = np.split(prompt.ids[length:], [len(prompt.ids) - length - sample.last + 1])
            key = prompt.prefix_key(question if caches.embedding.two_way else None)
            if key != caches.prefix.key:
                caches.enter(prompt, key, no_check)
            caches.prepare(self._full)
            embedded = caches.embedding.text(question, of_prompt=True)
            entering = [embedded.then(caches.embedding.text(answer)) if len(answer) else embedded]
            for stage in stages:
                entering.append(entering[-1].after(caches.run(len(entering) - 1, entering[-1])))
                watchers.output(stage.last, number, torch.from_numpy(np.asarray(entering[-1].hidden)))
                report(stage.layers)
            of_ks: dict[int | None, Tensor] = {None: _last(entering[-1].hidden, sample)}
            for k in ks:
                if k is not None:
                    caches.prepare(self._full)
                    mask = np.zeros(int(prompt.is_vision.sum()), bool)
                    caches.remove(boundary[k], Removal(mask, (), renumbers=False, shrinks=False))
                    tokens = entering[boundary[k]]
                    for later in range(boundary[k], len(stages)):
                        tokens = tokens.after(caches.run(later, tokens))
                    of_ks[k] = _last(tokens.hidden, sample)
            results.append(of_ks)
        return results

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocab]."""
        logits = self.backend.head(hidden.flatten(0, -2).contiguous().numpy())
        return torch.from_numpy(logits).reshape(*hidden.shape[:-1], -1)

    def _prompt(self, sample: Sample) -> tuple[Session, Prompt]:
        assert isinstance(sample.features, _Opened), "images are encoded by this engine"
        encoders = tuple((image.key, lambda image=image: image) for image in sample.features.images)
        is_vision = sample.ids == self._manifest.text.image_token_id
        return sample.features.session, Prompt(sample.ids, is_vision, encoders)


def _last(hidden: Any, sample: Sample) -> Tensor:
    return torch.from_numpy(np.array(hidden[-sample.last :]))
