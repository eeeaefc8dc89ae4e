"""InternVL-Chat 1.0: original LLaVA with an InternViT-6B tower, against transformers' tower and decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.runtime.session.test_original import QUESTION, VICUNA
from tests.support.bundles import export
from tests.support.exported import greedy, prompt
from tests.support.original import TOWER, counterpart, write_json
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image, random_tensor
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.runtime.api.load import load
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.report.golden import check_golden

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

STEPS, TOLERANCE = 6, 2e-5
TINY = Tiny(family="llava_llama", aspect="pad", context=1024, image=336, patch=42)  # 8 x 8 patches
TRAINED = 224 // 42  # positions a side
INTERNVIT = "InternViT-6B-224px"  # by which it is known
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 42}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def tower(folder: Path) -> Any:
    """Write a small InternViT-6B, and return transformers' own of the same weights."""
    from transformers import InternVLVisionConfig, InternVLVisionModel

    config = InternVLVisionConfig(
        **SIZES, image_size=[TRAINED * 42] * 2, norm_type="rms_norm", use_qk_norm=True, attention_bias=False,
        use_mean_pooling=True, layer_norm_eps=1e-6,
    )  # fmt: skip
    model: Any = InternVLVisionModel(config)
    values = {name: torch.from_numpy(random_tensor(name, tuple(t.shape), 0)) for name, t in model.state_dict().items()}
    model.load_state_dict(values)
    model.train(False)
    shutil.rmtree(folder)
    folder.mkdir()
    written = {
        "embeddings.class_embedding": values["embeddings.cls_token"],
        "embeddings.position_embedding": values["embeddings.position_embeddings"],
        "embeddings.patch_embedding.weight": values["embeddings.patch_embeddings.projection.weight"],
        "embeddings.patch_embedding.bias": values["embeddings.patch_embeddings.projection.bias"],
    }
    for layer in range(4):
        theirs, ours = f"encoder.layer.{layer}.", f"encoder.layers.{layer}."
        attention = theirs + "attention."
        thirds = [values[f"{attention}{part}_proj.weight"] for part in "qkv"]
        written[ours + "attn.qkv.weight"] = torch.cat(thirds)
        for old, new in (
            ("layernorm_before.weight", "norm1.weight"), ("layernorm_after.weight", "norm2.weight"),
            ("lambda_1", "ls1"), ("lambda_2", "ls2"), ("attention.q_norm.weight", "attn.q_norm.weight"),
            ("attention.k_norm.weight", "attn.k_norm.weight"),
            *((f"attention.projection_layer.{kind}", f"attn.proj.{kind}") for kind in ("weight", "bias")),
            *((f"mlp.{name}.{kind}",) * 2 for name in ("fc1", "fc2") for kind in ("weight", "bias")),
        ):  # fmt: skip
            written[ours + new] = values[theirs + old]
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    more = {"model_type": "intern_vit_6b", "image_size": 224, "qk_normalization": True, "qkv_bias": False}
    write_json(folder / "config.json", SIZES | more)
    return model


def with_internvit(folder: Path) -> Any:
    """Give a checkpoint in LLaVA's layout InternVL-Chat 1.0's tower; returns transformers' own of its weights."""
    config = json.loads((folder / "config.json").read_text())
    named = folder / INTERNVIT
    (folder / TOWER).rename(named)
    write_json(folder / "config.json", config | {"mm_vision_tower": f"x/{INTERNVIT}", "mm_vision_select_layer": -2})
    return tower(named)


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
    tiny_checkpoint: Callable[..., Path], reference: Callable[..., Reference], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(TINY), tmp_path / "checkpoint"))
    internvit, judge = with_internvit(folder), reference(counterpart(TINY))
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
                    np.testing.assert_allclose(found.logits[step], logits.numpy(), atol=TOLERANCE, rtol=0)
                    assert found.ids[step] == int(logits.argmax())
                    now = torch.cat([now, embed(torch.tensor([[found.ids[step]]]))], 1)
                    image = torch.cat([image, torch.tensor([False])])
        assert all(check.passed for check in check_golden(model))
    opened = open_checkpoint(str(folder))
    named = folder / INTERNVIT
    write_json(named / "config.json", json.loads((named / "config.json").read_text()) | {"qkv_bias": True})
    assert read_config(opened.config).vision.position_grid == TRAINED
    with pytest.raises(UnsupportedModelError, match="vtx exports InternViT-6B only"):
        read_config(open_checkpoint(str(folder)).config)
