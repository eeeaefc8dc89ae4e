"""The pictures of a conversation, encoded once for each threshold of merging, and what of them enters the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Entry
from vtx.runtime.session.prefix import ImageEncoders
from vtx.runtime.vision.tokens import ImageTokens

MAX_THRESHOLDS = 4  # of which the rows are kept; beyond these the oldest go


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One preprocessed image: [3, height, width] float32 and the hash of these pixels."""

    pixels: NDArray[np.float32]
    key: str


@dataclass(slots=True)
class EncodedImages:
    """Rows of `pictures` by merging threshold. Its owner locks it."""

    backend: Backend
    pictures: tuple[PreparedImage, ...]
    _encoded: dict[float | None, dict[str, ImageTokens]] = field(default_factory=dict)

    def encoders(self, entries: Sequence[Entry]) -> ImageEncoders:
        """For each picture a key that stands for its rows, and the call that gives them."""
        how = "".join(f" {entry!r}" for entry in entries)
        return tuple((picture.key + how, partial(self._enter, picture, entries)) for picture in self.pictures)

    def _enter(self, picture: PreparedImage, entries: Sequence[Entry]) -> ImageTokens:
        tau = next((entry.tau for entry in entries if entry.tau is not None), None)
        image = self._tower(picture, tau)
        for entry in entries:
            which = entry.enters(image)
            image = image if which is None else image.take(which)
        return image

    def _tower(self, picture: PreparedImage, tau: float | None) -> ImageTokens:
        rows = self._encoded.get(tau, {})
        if picture.key not in rows:
            image = self.backend.vision(picture.pixels[None], tau)
            attention = image.patches.attention
            if attention is not None and not np.isfinite(attention).all():
                raise BundleError("the class token's attention is not a number; use --reduce none, or export at fp32")
            rows = {**rows, picture.key: image}
            self._encoded = dict(list({**self._encoded, tau: rows}.items())[-MAX_THRESHOLDS:])
        return rows[picture.key]
