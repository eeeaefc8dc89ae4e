"""InternVL-Chat 1.0: original LLaVA with an InternViT-6B tower, against transformers' tower and decoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.bundles import export
from tests.support.exported import greedy, prompt
from tests.support.families.internvl_chat_1 import INTERNVIT, INTERNVL_CHAT_1, TRAINED, with_internvit
from tests.support.families.original import QUESTION, VICUNA, counterpart
from tests.support.fixtures import Checkpoints, References
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.runtime.api.load import load
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.report.golden import check_golden

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

STEPS, TOLERANCE = 6, 2e-5
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def pixels(images: list[Image.Image]) -> torch.Tensor:
    from transformers import LlavaImageProcessorPil

    square = {"height": 336, "width": 336}
    processor = LlavaImageProcessorPil(
        do_pad=True, size={"shortest_edge": 336}, crop_size=square, image_mean=MEAN, image_std=STD
    )
    found: torch.Tensor = processor(images, return_tensors="pt")["pixel_values"]
    return found


@pytest.mark.slow
@torch.inference_mode()
def test_a_bundle_answers_as_transformers_parts(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(INTERNVL_CHAT_1), tmp_path / "checkpoint"))
    internvit, judge = with_internvit(folder), reference(counterpart(INTERNVL_CHAT_1))
    embed, projector = judge.model.model.language_model.embed_tokens, judge.model.model.multi_modal_projector
    cut = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    made = export(folder, tmp_path / "bundle", (3, 5))
    with load(made.folder, device="cpu", threads=1) as model:
        for shapes in (((150, 60),), ((40, 90), (150, 60))):
            images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
            states = internvit(pixels(images), output_hidden_states=True).hidden_states[-2][:, 1:]
            ids, rows = [1], [embed(torch.tensor([1]))]
            for number, piece in enumerate(VICUNA.format("<image>\n" * len(images), QUESTION).split("<image>")):
                if number:
                    rows.append(projector(states[number - 1]))
                    ids += [0] * 64
                ids += cut.encode(piece)
                rows.append(embed(torch.tensor(cut.encode(piece))))
            asked, vision = prompt(model, prompt_messages(QUESTION, len(images)), images), torch.tensor(ids) == 0
            assert asked.ids.tolist() == ids
            for k in (None, 3, 5):
                found, now, image = greedy(model, asked, k, STEPS), torch.cat(rows)[None], vision
                for step in range(STEPS):
                    logits = judge.last_logits(now, image, k)
                    assert_near(found.logits[step], logits.numpy(), TOLERANCE)
                    assert found.ids[step] == int(logits.argmax())
                    now = torch.cat([now, embed(torch.tensor([[found.ids[step]]]))], 1)
                    image = torch.cat([image, torch.tensor([False])])
        assert all(check.passed for check in check_golden(model))
    opened = open_checkpoint(str(folder))
    named = folder / INTERNVIT
    write_json(named / "config.json", read_json(named / "config.json") | {"qkv_bias": True})
    assert read_config(opened.config).vision.position_grid == TRAINED
    with pytest.raises(UnsupportedModelError, match="vtx exports InternViT-6B only"):
        read_config(open_checkpoint(str(folder)).config)
