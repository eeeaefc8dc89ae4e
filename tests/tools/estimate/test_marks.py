"""The text among an image's tokens counts in plans as the processor prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.families.gemma import GEMMA3
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.minicpm import MINICPM
from tests.support.families.paddleocr_vl import PADDLE
from tests.support.families.pixtral import PIXTRAL
from tests.support.families.smolvlm import SMOLVLM
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image

from vtx.exporter.checkpoint.spec import find_size

SIZES = ((1, 1), (40, 40), (56, 28), (28, 56), (120, 40), (64, 150), (200, 200), (90, 70), (113, 57), (300, 20))
TINIES = [
    PIXTRAL, LFM2, LFM3, replace(MINICPM, tokenizer="bytes"), PADDLE, replace(GEMMA3, tokenizer="bytes"),
    replace(SMOLVLM, context=2048),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", TINIES, ids=lambda tiny: str(tiny.family))
def test_a_plan_counts_the_tokens_of_an_image_with_their_marks(
    tiny_checkpoint: Callable[..., Path], tiny: Tiny
) -> None:
    checkpoint = tiny_checkpoint(tiny)
    judge = Reference(checkpoint)
    size = find_size(str(checkpoint))
    text = set()
    for picture in SIZES:
        inputs = judge.inputs(prompt_messages("red?", 1), [random_image(0, picture)])
        tokens, _ = size.picture(*picture)
        text.add(inputs["input_ids"].shape[1] - tokens - size.marks(*picture))
    assert len(text) == 1, "what else is in the prompt depends on the picture's size"
