"""Embeddings of images: the mean of an image's tokens as tower and projector give them, of length 1."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.server.openai.request import ChatRequest
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.session.prefix import Check

NAMES = {"messages": "input"}
FORMATS = ("float", "base64")


def chat_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion about the images of a body of /v1/embeddings."""
    fields = dict(body)
    given, form = fields.pop("input", None), fields.pop("encoding_format", "float")
    urls = [given] if isinstance(given, str) else given
    if not isinstance(urls, list) or not urls:
        raise Refusal(
            400, "input must be an image as a data URL, or a list of these", code="invalid_value", param="input"
        )
    if form not in FORMATS:
        raise Refusal(
            400, f"encoding_format is {form!r:.40}; it must be {' or '.join(FORMATS)}", code="invalid_value",
            param="encoding_format",
        )  # fmt: skip
    unknown = sorted(set(fields) - {"model", "user"})
    if unknown:
        raise Refusal(
            400, f"there is no field {shown(unknown[0])} of embeddings; leave it out", code="unknown_parameter",
            param=unknown[0][:80],
        )  # fmt: skip
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {**fields, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


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
