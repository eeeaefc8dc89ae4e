"""The exporter's own statement of model and method, layer by layer, agrees with transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.reference import model as streamed

TOLERANCE = 5e-5
DEPTHS = (None, 2, 3, 5, 8)
QUESTION = "What is the colour of the square in the picture?"
VARIANTS = {
    "llama-clip": Tiny(),
    "llama-biases-full": Tiny(vision="siglip", select="full", attention_bias=True, mlp_bias=True, names="saved"),
    "llama-wide-heads-llama3-layers": Tiny(head_dim=24, rope="llama3", feature_layer=(-2, -1), names="new"),
    "mistral-linear-mha": Tiny(text="mistral", rope="linear", feature_layer=2, kv_heads=4, projector_act="silu"),
    "qwen2-siglip-tied-sharded": Tiny(text="qwen2", vision="siglip", tied=True, shards=3, projector_bias=False),
    "half": Tiny(dtype="float16", tokenizer="bytes"),
}


@pytest.fixture(params=VARIANTS.values(), ids=list(VARIANTS))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    found: Tiny = request.param
    return found


def open_reference(folder: Path) -> streamed.Reference:
    checkpoint = open_checkpoint(str(folder))
    return streamed.Reference(checkpoint, read_config(checkpoint.config))


@pytest.mark.sampled
@pytest.mark.parametrize("images", [1, 2])
def test_it_agrees_with_transformers_at_every_depth(
    tiny_checkpoint: Checkpoints, reference: References, tiny: Tiny, images: int
) -> None:
    found, judge = open_reference(tiny_checkpoint(tiny)), reference(tiny)
    inputs = judge.inputs(prompt_messages(QUESTION, images), [random_image(seed) for seed in range(images)])
    with torch.inference_mode():
        features = found.features(inputs["pixel_values"].numpy())
        wanted = judge.model.model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        assert_near(features, torch.cat(list(wanted)), TOLERANCE)
        logits = found.logits(inputs["input_ids"][0].numpy(), streamed.Encoded(features), DEPTHS)
        assert set(logits) == set(DEPTHS)
        for k in DEPTHS:
            assert_near(logits[k], judge.logits(inputs, k), TOLERANCE)


def test_one_depth_alone_gives_what_it_gives_among_others(tiny_checkpoint: Checkpoints) -> None:
    found = open_reference(tiny_checkpoint())
    ids = np.array([1, 50, *[319] * 16, 60, 61, 62])
    features = streamed.Encoded(torch.linspace(-1, 1, 16 * 64).reshape(16, 64))
    with torch.inference_mode():
        together = found.logits(ids, features, DEPTHS)
        for k in DEPTHS:
            assert_near(found.logits(ids, features, [k])[k], together[k], TOLERANCE)
    assert len({int(rows.argmax()) for rows in together.values()}) > 1


def test_progress_is_told_once_a_layer(tiny_checkpoint: Checkpoints) -> None:
    told: list[int] = []
    with torch.inference_mode():
        open_reference(tiny_checkpoint()).logits(
            np.array([1, 50, 60]), streamed.Encoded(torch.zeros(0, 64)), [None], told.append
        )
    assert told == [1] * Tiny().layers
