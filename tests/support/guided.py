"""Choices scored without caches or tries, to which the runtimes' probabilities are held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from tests.support.exported import policy, prompt
from vtx.runtime.api.model import Model
from vtx.runtime.session.session import Session


def plain_scores(model: Model, picture: Image.Image, question: str, choices: Sequence[str]) -> list[float]:
    """The probabilities of choices: each whole conversation as one new prompt, at the default K."""
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    asked, found = prompt(model, [user], [picture]), list[float]()
    for choice in choices:
        own = model.loaded.text.answer_ids(choice)
        session = Session(model.backend, model.manifest)
        rows = [
            session.prefill(asked, policy(model.manifest.default_k)).logits,
            *(session.decode(token) for token in own),
        ]
        known = [row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64)) for row in rows]
        ends = np.logaddexp.reduce(known[-1][list(model.manifest.text.end_ids)])
        found.append(float(sum(row[token] for row, token in zip(known, own, strict=False)) + ends))
    odds = np.exp(np.array(found) - np.logaddexp.reduce(found))
    return [float(value) for value in odds]
