"""Embeddings of images: the mean of an image's tokens as tower and projector give them, of length 1."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.server.openai.fields import WHERE, FieldReader, image_part
from vtx.runtime.server.openai.request import ChatRequest
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.session.prefix import Check
from vtx.runtime.strict import optional

NAMES = {"messages": "input"}


@dataclass(frozen=True, slots=True)
class EmbeddingFields:
    """A request of embeddings; `user` has no effect."""

    input: str | tuple[str, ...]
    model: str = optional("")
    encoding_format: Literal["float", "base64"] = optional("float")
    user: str = optional("")


def chat_fields(body: dict[str, Any], reader: FieldReader) -> dict[str, Any]:
    """The fields of a chat completion about the images of a body of /v1/embeddings."""
    fields = reader.read(EmbeddingFields, body, WHERE)
    urls = [fields.input] if isinstance(fields.input, str) else fields.input
    if not urls:
        raise Refusal(
            400, "input must be an image as a data URL, or a list of these", code="invalid_value", param="input"
        )
    parts = list(map(image_part, urls))
    content = [*parts, {"type": "text", "text": "?"}]
    return {"model": fields.model, "messages": [{"role": "user", "content": content}]}


def embeddings(
    loaded: LoadedBundle, request: ChatRequest, images: Sequence[PreparedImage], check: Check
) -> dict[str, Any]:
    """The reply: a vector [hidden] for each image, and the number of image tokens."""
    data = list[dict[str, Any]]()
    for index, image in enumerate(images):
        mean = image.encode(loaded.backend, check=check).hidden.mean(axis=0, dtype=np.float64)
        vector = (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype("<f4")
        coded = (
            base64.b64encode(vector.tobytes()).decode() if request.fields.get("encoding_format") == "base64" else None
        )
        data.append({"object": "embedding", "index": index, "embedding": coded or vector.tolist()})
    tokens = sum(image.tokens for image in images)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": request.model, "data": data, "usage": usage}
