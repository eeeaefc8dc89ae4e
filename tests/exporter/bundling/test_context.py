"""The context of a bundle that is exported without --max-context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.exporter.bundling import choices
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export

ONEVISION = Tiny(
    family="llava_onevision", text="qwen2", vision="siglip", select="full", feature_layer=-1, tokenizer="bytes",
    context=32_768,
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [ONEVISION, replace(SMOLVLM, context=8192)], ids=lambda tiny: tiny.family)
def test_the_largest_image_a_question_and_an_answer_fit(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    """Of LLaVA-OneVision's published sizes an image takes up to 8,829 tokens, of Granite Vision's 8,289."""
    options = ExportOptions(str(tiny_checkpoint(tiny)))
    largest = plan_export(options).config.layout.max_tokens
    monkeypatch.setattr(choices, "DEFAULT_CONTEXT", largest)
    assert plan_export(options).max_context == largest + choices.ASKED
    monkeypatch.setattr(choices, "DEFAULT_CONTEXT", 4096)
    assert plan_export(options).max_context == max(4096, largest + choices.ASKED)
    assert plan_export(replace(options, max_context=largest + 2)).max_context == largest + 2


def test_the_model_s_limit_ends_it(tiny_checkpoint: Checkpoints) -> None:
    assert plan_export(ExportOptions(str(tiny_checkpoint(Tiny(context=256))))).max_context == 256
