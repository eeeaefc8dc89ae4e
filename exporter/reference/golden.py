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
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.reference.model import Reference, Sample, Watchers
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

ROUTER = "mlp.gate"  # its matrix in a layer
PARTS = 8  # of an image, at most, of which one is used
PART_TOKENS = 8


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
    """Run the reference at every K of `ks` and write its features, logits and largest values to `path`.

    Of a model with experts it runs with several parts of the image, and that one counts for which no router's choice
    is as close as the closest ones for the others: rounding then chooses the same experts.
    """
    config = reference.config
    image = golden_image()
    ids = golden_ids(text, config.layout)
    pixels = golden.golden_pixels(config.layout.views(image, settings))
    largest = np.zeros(config.text.layers, np.float32)

    def measure(layer: int, values: Tensor) -> None:
        largest[layer - 1] = max(largest[layer - 1], float(values.abs().max()))

    with torch.inference_mode():
        features = reference.encode([image], settings)
        parts = image_parts(len(features.hidden)) if config.text.mixture else [golden.FIRST]
        margins = np.full(len(parts), np.inf, np.float32)

        def feed(layer: int, number: int, name: str, inputs: Tensor) -> None:
            measure(layer, inputs)
            if name == ROUTER:
                margins[number] = min(margins[number], router_margin(reference, layer, inputs))

        decoded = [golden.decoded_ids(ids, config.image_token_id, part) for part in parts]
        samples = [Sample(own, features.part(part)) for own, part in zip(decoded, parts, strict=True)]
        watchers = Watchers(output=lambda layer, _, out: measure(layer, out), feed=feed)
        states = reference.hidden(samples, ks, report, watchers)
        best = int(margins.argmax())
        logits = reference.head(torch.cat([states[best][k] for k in ks]))
    tensors = {"ids": ids, "pixels": pixels, "features": features.hidden[: golden.FEATURE_TOKENS].numpy()}
    tensors |= {LARGEST: largest, **{golden.key_of(k): row.numpy() for k, row in zip(ks, logits, strict=True)}}
    if config.text.mixture:
        bounds = [parts[best].start, parts[best].stop]
        tensors |= {golden.PART: np.array(bounds), golden.MARGIN: margins[best : best + 1]}
    write_safetensors(path, {n: np.ascontiguousarray(t) for n, t in tensors.items()}, {"reference": "plain PyTorch"})


def image_parts(count: int) -> list[slice]:
    """Parts of `PART_TOKENS` of an image's tokens, from its begin to its end."""
    starts = np.linspace(0, max(0, count - PART_TOKENS), PARTS).astype(int)
    return [slice(start, start + PART_TOKENS) for start in dict.fromkeys(starts.tolist())]


def router_margin(reference: Reference, layer: int, inputs: Tensor) -> float:
    """By how much the last chosen expert's logit exceeds the next one's at least, as a share of the largest logit.

    Inputs of a layer's router are [n, hidden].
    """
    mixture = reference.config.text.mixture
    assert mixture is not None
    scores = F.linear(inputs, reference.weight(f"text.layers.{layer - 1}.{ROUTER}.weight"))
    if mixture.active == mixture.count:
        return float("inf")
    last, following = scores.topk(mixture.active + 1, -1).values[:, -2:].T
    return float((last - following).min() / scores.abs().max())


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
