"""LISA: original LLaVA with a projector of one matrix and added tokens."""

from __future__ import annotations

from typing import Any

from tests.support.tiny import Tiny, random_tensor

QUESTION = "What is red?"
LISA = Tiny(family="lisa", context=512)
OFTEN = -2  # what the logits of LISA's [SEG] are multiplied by, so that answers hold it
ADDED = ("[SEG]", "<im_start>", "<im_end>")  # behind the pieces of its tokenizer.model


def make_projector(tiny: Tiny, seed: int = 0) -> dict[str, Any]:
    """The one matrix of LISA's projector and its bias."""
    import torch

    shapes = {"weight": (tiny.hidden, tiny.vision_hidden), "bias": (tiny.hidden,)}
    return {
        f"model.mm_projector.{kind}": torch.from_numpy(random_tensor(kind, of, seed)) for kind, of in shapes.items()
    }
