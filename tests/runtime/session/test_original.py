"""Original-layout LLaVA against transformers' LLaVA of the same weights, and the original way to cut prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.exported import Models, prompt
from tests.support.families.original import ANYRES, PAD, QUESTION, VICUNA, counterpart
from tests.support.fixtures import Checkpoints
from tests.support.parity import assert_parity
from tests.support.reference import Inputs, Reference
from tests.support.tiny import Message, Tiny, prompt_messages, random_image
from vtx.exporter.checkpoint.families.llava_llama import IMAGE_TOKEN_ID

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

WIDE, HIGH = (150, 60), (40, 90)
PROMPTS = {PAD: VICUNA, ANYRES: "[INST] {}{} [/INST]"}
IDS = ["pad, pickled, grouped", "anyres, multi-head"]


def judged(judge: Reference, tiny: Tiny, messages: list[Message], images: list[Image.Image]) -> Inputs:
    """The prompt as the original makes it: cut at its images, each piece tokenised alone, a BOS in front of the first.

    Pixels come from transformers' port of the original's padding, or of its tiles.
    """
    folder = Path(judge.model.name_or_path).parent
    cut = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    text = PROMPTS[tiny].format("<image>\n" * len(images), QUESTION)
    inputs = [_pictures(judge, tiny, [image]) for image in images]
    ids = [1]
    for number, piece in enumerate(text.split("<image>")):
        if number:
            ids += [judge.image_token] * inputs[number - 1].pop("count")
        ids += cut.encode(piece)
    together = _pictures(judge, tiny, images)
    together.pop("count")
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long), **together}


def _pictures(judge: Reference, tiny: Tiny, images: list[Image.Image]) -> dict[str, Any]:
    if tiny.aspect == "pad":
        from transformers import LlavaImageProcessorPil

        settings = judge.processor.image_processor.to_dict()
        names = ("size", "crop_size", "image_mean", "image_std")
        processor = LlavaImageProcessorPil(do_pad=True, **{name: settings[name] for name in names})
        found = dict(processor(images, return_tensors="pt"))
        return {"pixel_values": found["pixel_values"], "count": len(images) * tiny.vision_tokens}
    found = judge.inputs(prompt_messages("x", len(images)), images)
    count = int((found.pop("input_ids") == judge.image_token).sum())
    found.pop("attention_mask")
    return found | {"count": count}


@pytest.fixture(scope="module")
def judges(tiny_checkpoint: Checkpoints) -> Callable[[Tiny], Reference]:
    """Transformers' model of the same weights, beside a copy of the original's tokenizer.model."""

    def judge(tiny: Tiny) -> Reference:
        theirs, ours = tiny_checkpoint(counterpart(tiny)), tiny_checkpoint(tiny)
        (theirs.parent / "tokenizer.model").write_bytes((ours / "tokenizer.model").read_bytes())
        return Reference(theirs)

    return judge


@pytest.mark.parametrize("tiny", [PAD, pytest.param(ANYRES, marks=pytest.mark.slow)], ids=IDS)
def test_a_bundle_answers_as_transformers_and_at_k_as_the_statement(
    models: Models, judges: Callable[[Tiny], Reference], tiny: Tiny
) -> None:
    model, judge = models(tiny, (3, 5)), judges(tiny)
    for shapes in ((WIDE,), (HIGH,), (HIGH, WIDE)):
        images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
        messages = prompt_messages(QUESTION, len(images))
        inputs, asked = judged(judge, tiny, messages, images), prompt(model, messages, images)
        wanted_ids = [IMAGE_TOKEN_ID if id == judge.image_token else id for id in inputs["input_ids"][0].tolist()]
        assert asked.ids.tolist() == wanted_ids
        assert_parity(model, judge, inputs, asked)
