"""The parts of a bundle that the plain reference computes: golden vectors, and the scales of 8-bit K and V.

Golden vectors are logits for a fixed image and question; `vtx-doctor BUNDLE` computes them with the bundle to prove
parity. Scales come from the largest values of each channel on a real prompt. K is stored rotated, and rotation mixes
pairs of channels by an angle that grows with the position. The length of a pair is measured instead, which no position
changes: a scale measured on a short prompt is valid for a long context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.reference.model import Reference, Sample
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.tensors import LARGEST
from vtx.runtime.prompt.messages import Part
from vtx.runtime.prompt.text import Text
from vtx.runtime.report import golden
from vtx.runtime.report.golden import QUESTION, golden_image
from vtx.runtime.vision.layout import Layout


def golden_ids(text: Text, layout: Layout, question: str = QUESTION) -> NDArray[np.int64]:
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
    """Run the reference at every K of `ks` and write its features, logits and largest values to `path`."""
    config = reference.config
    image = golden_image()
    ids = golden_ids(text, config.layout)
    pixels = golden.golden_pixels(config.layout.views(image, settings))
    decoded = golden.decoded_ids(ids, config.image_token_id)
    largest = np.zeros(config.text.layers, np.float32)

    def measure(layer: int, values: Tensor) -> None:
        largest[layer - 1] = max(largest[layer - 1], float(values.abs().max()))

    with torch.inference_mode():
        features = reference.encode([image], settings)
        logits = reference.logits(decoded, features.first(golden.DECODED_TOKENS), ks, report, measure)
    tensors = {"ids": ids, "pixels": pixels, "features": features.hidden[: golden.FEATURE_TOKENS].numpy()}
    tensors |= {LARGEST: largest, **{golden.key_of(k): values.numpy() for k, values in logits.items()}}
    write_safetensors(path, {n: np.ascontiguousarray(t) for n, t in tensors.items()}, {"reference": "plain PyTorch"})


MARGIN = 2.0  # of the scales over the measured values; larger values are clipped
STEPS = 127  # the largest integer
SMALLEST = 1 / 64  # the least scale of a channel, relative to the head's largest
PASSAGE = (
    "The market opens at seven. By then the farmers have set out apples, onions and 24 kinds of cheese, the baker's "
    'van is late as always, and somebody has asked: "Is this the queue?" It is not! Prices (in euros) hang on paper '
    "signs; a kilo of cherries costs 6.50, two cost 12. Rain is likely on Thursday, when fewer people come, so most "
    "stalls close before noon and the square is quiet again."
)


def record_kv_scales(
    path: Path,
    reference: Reference,
    text: Text,
    settings: ImageSettings,
    report: Callable[[int], None],
) -> None:
    """Run the reference over the golden picture and a passage of text, and write each layer's scales to `path`.

    They are [1, kv_heads, 1, head_dim] float32, by their names in the graphs. `report` gets 1 a layer.
    """
    ids = golden_ids(text, reference.config.layout, f"{PASSAGE} {QUESTION}")
    tensors: dict[str, NDArray[np.float32]] = {}
    with torch.inference_mode(), returning_memory():
        features = reference.encode([golden_image()], settings)
        for layer, key, value in reference.keys_values(Sample(ids, features), report):
            lengths = torch.hypot(*key.chunk(2, -1))  # of the pairs that are rotated together
            tensors[names.key_scale(layer)] = _scale(torch.cat((lengths, lengths), -1))
            tensors[names.value_scale(layer)] = _scale(value.abs())
    write_safetensors(path, tensors, {"margin": str(MARGIN), "rows": str(len(ids))})


def _scale(magnitudes: Tensor) -> NDArray[np.float32]:
    """Magnitudes [kv_heads, tokens, head_dim] to scales [1, kv_heads, 1, head_dim]."""
    most = magnitudes.amax(1, keepdim=True)
    floor = SMALLEST * most.amax(-1, keepdim=True)
    most = torch.where(floor > 0, torch.maximum(most, floor), torch.ones_like(most))
    scale: NDArray[np.float32] = (MARGIN / STEPS * most)[None].numpy()
    return np.ascontiguousarray(scale)
