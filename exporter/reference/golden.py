"""Golden vectors: the plain reference's logits for a fixed image and question, stored in the bundle.

`vtx-doctor BUNDLE` computes them with the bundle to prove parity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vtx.exporter.reference.model import Reference
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.prompt.messages import Part
from vtx.runtime.prompt.text import Text
from vtx.runtime.report.golden import (
    DECODED_TOKENS,
    FEATURE_TOKENS,
    QUESTION,
    decoded_ids,
    golden_image,
    golden_pixels,
    key_of,
)
from vtx.runtime.vision.layout import Layout


def golden_ids(text: Text, layout: Layout, question: str = QUESTION) -> NDArray[np.int64]:
    """Token ids [tokens] of the golden image and a question."""
    content: list[Part] = [{"type": "image"}, {"type": "text", "text": question}]
    return text.prompt([{"role": "user", "content": content}], [layout.prompt_image(*golden_image().size)])


def record_golden(
    path: Path,
    reference: Reference,
    text: Text,
    settings: ImageSettings,
    ks: Sequence[int | None],
    report: Callable[[int], None],
) -> None:
    """Run the reference at every K of `ks` and write its features and logits to `path`."""
    config, image = reference.config, golden_image()
    ids = golden_ids(text, config.layout)
    pixels = golden_pixels(config.layout.views(image, settings))
    with torch.inference_mode():
        features = reference.encode([image], settings)
        logits = reference.logits(decoded_ids(ids, config.image_token_id), features.first(DECODED_TOKENS), ks, report)
    tensors = {"ids": ids, "pixels": pixels, "features": features.hidden[:FEATURE_TOKENS].numpy()}
    tensors |= {key_of(k): values.numpy() for k, values in logits.items()}
    write_safetensors(path, {n: np.ascontiguousarray(t) for n, t in tensors.items()}, {"reference": "plain PyTorch"})
