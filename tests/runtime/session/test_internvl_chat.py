"""InternVL-Chat in its authors' layout against transformers' InternVL of the same weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.bundles import ORT, export
from tests.support.exported import Models, prompt
from tests.support.families.internvl_chat import ADDED, INTERNLM, counterpart
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.parity import assert_parity
from tests.support.reference import Inputs, Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.original.templates import INTERNVL_SYSTEMS
from vtx.runtime.api.load import load
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.runtime.vision.tokens import TokenStates

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

WIDE, HIGH = (300, 110), (90, 200)
QUESTION = "What is red?"
QWEN = Tiny(
    family="internvl_chat", vision="internvl", feature_layer=-1, image=112, context=1024, text="qwen2", kv_heads=4,
    attention_bias=True, tokenizer="bytes",
)  # fmt: skip
SPECIAL = re.compile("(" + "|".join(map(re.escape, ADDED)) + ")")


class Judge(Reference):
    """Transformers' InternVL, asked with the prompt that the released code makes."""

    def __init__(self, theirs: Path, ours: Path, tiny: Tiny) -> None:
        super().__init__(theirs)
        self.ours, self.tiny = ours, tiny
        if tiny is QWEN:  # its pixel shuffle is v1: the same tokens column by column
            shuffle = self.model.model.pixel_shuffle
            self.model.model.pixel_shuffle = lambda *given, **named: shuffle(*given, **named).transpose(1, 2)

    def chat_inputs(self, images: Sequence[Image.Image]) -> Inputs:
        pixels = [self._tiles(image) for image in images]
        given = "".join(f"<img>{'<IMG_CONTEXT>' * len(tiles) * self.tiny.vision_tokens}</img>\n" for tiles in pixels)
        name, after = ("internvl2_5", "\n") if self.tiny is QWEN else ("internlm2-chat", "")
        system = f"<|im_start|>system\n{INTERNVL_SYSTEMS[name]}<|im_end|>{after}"
        text = f"{system}<|im_start|>user\n{given}{QUESTION}<|im_end|>{after}<|im_start|>assistant\n"
        every = torch.tensor([self._ids(text)])
        return {"input_ids": every, "attention_mask": torch.ones_like(every), "pixel_values": torch.cat(pixels)}

    def _tiles(self, image: Image.Image) -> torch.Tensor:
        processor = self.processor.image_processor
        found: torch.Tensor = processor(image, crop_to_patches=True, return_tensors="pt")["pixel_values"]
        return found

    def _ids(self, text: str) -> list[int]:
        if self.tiny is QWEN:
            from transformers import AutoTokenizer

            ids: list[int] = AutoTokenizer.from_pretrained(self.ours)(text)["input_ids"]
            return ids
        added = read_json(self.ours / "added_tokens.json")
        cut = sentencepiece.SentencePieceProcessor(model_file=str(self.ours / "tokenizer.model"))
        pieces = [[added[piece]] if piece in added else cut.encode(piece) for piece in SPECIAL.split(text)]
        return [1, *(id for piece in pieces for id in piece)]


@pytest.fixture(scope="module")
def judge(tiny_checkpoint: Checkpoints) -> Callable[[Tiny], Judge]:
    return lambda tiny: Judge(tiny_checkpoint(counterpart(tiny)), tiny_checkpoint(tiny), tiny)


@pytest.mark.parametrize(
    "tiny",
    [INTERNLM, pytest.param(QWEN, marks=pytest.mark.slow)],
    ids=["InternLM2, grouped", "Qwen2, multi-head, biases, column by column"],
)
def test_a_bundle_answers_as_transformers_and_at_k_as_the_statement(
    models: Models, judge: Callable[[Tiny], Judge], tiny: Tiny
) -> None:
    model, judging = models(tiny, (3, 5)), judge(tiny)
    assert model.loaded.images.layout == Tiles(112, 16, 1, 6)
    for shapes in ((WIDE,), (HIGH,), (HIGH, WIDE)):
        images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
        inputs, asked = judging.chat_inputs(images), prompt(model, prompt_messages(QUESTION, len(images)), images)
        assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
        assert_parity(model, judging, inputs, asked)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_fused_matrices_are_stored_as_separate_ones_are(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str
) -> None:
    """The bundle of InternVL's own layout and that of Hugging Face's have the same decoder."""
    answers = []
    for name, tiny in (("own", INTERNLM), ("hf", counterpart(INTERNLM))):
        folder = export(tiny_checkpoint(tiny), tmp_path / name, (3,), precision, dialects=ORT).folder
        with load(folder, device="cpu", threads=1) as model:
            images, ids = [random_image(0, WIDE)], np.arange(4, 40)
            answers.append(model.loaded.images.prepare(images[0]).encode(model.backend).hidden)
            hidden, cache = model.backend.embed(ids).hidden, model.backend.stage(0, 64)
            answers.append(cache.append(TokenStates(hidden), np.arange(len(ids))))
    np.testing.assert_array_equal(answers[0], answers[2])
    np.testing.assert_array_equal(answers[1], answers[3])


def test_the_end_of_an_answer_is_the_templates(models: Models) -> None:
    assert models(INTERNLM, (3, 5)).manifest.text.end_ids == (318,)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("use_thumbnail", False, "use_thumbnail False is not supported"),
        ("pad2square", True, "pad2square True is not supported"),
        ("downsample_ratio", 0.25, "downsample_ratio 0.25 is not supported"),
        ("force_image_size", 224, "force_image_size 224 is not the tower's 112"),
        ("llm_config", {"architectures": ["Phi3ForCausalLM"]}, "the decoder 'Phi3ForCausalLM' is not supported"),
        ("template", "phi3-chat", "the template 'phi3-chat' is not supported"),
        ("system_message", "{{ x }}", "is not plain text"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    tiny_checkpoint: Checkpoints, name: str, value: Any, message: str
) -> None:
    config = read_json(tiny_checkpoint(INTERNLM) / "config.json") | {name: value}
    original = find_family(config).original
    assert original is not None
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        assert read_config(config) and original.template(config)  # noqa: PT018 - either may refuse


def test_a_tokenizer_that_does_not_say_the_images_token_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(INTERNLM), tmp_path / "checkpoint"))
    write_json(folder / "added_tokens.json", {"<|im_end|>": 318})
    with pytest.raises(CheckpointError, match="gives the id of <IMG_CONTEXT>"):
        open_checkpoint(str(folder))
