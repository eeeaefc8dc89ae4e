"""GLM-OCR, PaddleOCR-VL and LFM3-VL: pictures as their processors make them, published sizes, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.families import glm_ocr, lfm3_vl, paddleocr_vl
from tests.support.json_files import read_json
from tests.support.near import assert_near
from tests.support.tiny import Tiny, make, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.processor import image_settings
from vtx.exporter.checkpoint.spec import config_size
from vtx.exporter.weights.tensors import CheckpointWeights
from vtx.runtime.bundle.safetensors import read_bits, read_header
from vtx.runtime.errors import BundleError, CheckpointError, RequestError, UnsupportedModelError
from vtx.runtime.vision.layouts.native import Native
from vtx.tools.estimate.sizes import KNOWN

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "glm-ocr": {
        "architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr", "image_token_id": 59280,
        "text_config": {
            "model_type": "glm_ocr_text", "vocab_size": 59392, "hidden_size": 1536, "intermediate_size": 4608,
            "head_dim": 128, "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0,
                "rope_theta": 10000,
            },
        },
        "vision_config": {
            "model_type": "glm_ocr_vision", "hidden_size": 1024, "depth": 24, "num_heads": 16, "attention_bias": True,
            "intermediate_size": 4096, "hidden_act": "silu", "patch_size": 14, "out_hidden_size": 1536,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    "lfm3-vl-2b": {
        "architectures": ["Lfm3VlForConditionalGeneration"], "model_type": "lfm3_vl", "image_token_id": 125030,
        "text_config": {"model_type": "lfm3"}, "vision_config": {"model_type": "lfm3_vl_vision"},
    },
    "paddleocr-vl": {
        "architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl",
        "image_token_id": 100295, "tie_word_embeddings": False, "vision_config": {"model_type": "paddleocr_vl"},
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    },
}  # fmt: skip
SIZES = (
    (17, 19), (64, 64), (100, 60), (640, 480), (480, 640), (300, 900), (10, 300), (512, 14), (33, 77), (5, 5), (27, 28),
    (14, 2000), (1700, 2200),
)  # fmt: skip
TINIES = (glm_ocr.GLM_OCR, paddleocr_vl.PADDLE, lfm3_vl.LFM3)
PROCESSORS = {
    "glm_ocr": "Glm46VImageProcessorPil",
    "lfm3_vl": "Qwen2VLImageProcessorPil",
    "paddleocr_vl": "PaddleOCRVLImageProcessorPil",
}


def patches_of(view: np.ndarray[Any, Any], side: int, family: str) -> np.ndarray[Any, Any]:
    """The patches of a view [3, height, width] in the order of the family's processor, [patches, numbers]."""
    _, height, width = view.shape
    rows, columns = height // side, width // side
    if family == "paddleocr_vl":
        return view.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    squares = view.reshape(3, rows // 2, 2, side, columns // 2, 2, side).transpose(1, 4, 2, 5, 0, 3, 6)
    return squares.reshape(rows * columns, 3, 1, side**2).repeat(2, 2).reshape(rows * columns, -1)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", TINIES, ids=lambda tiny: tiny.family)
def test_tokens_and_pixels_are_those_of_the_processor_at_any_size(tiny: Tiny, tmp_path: Path) -> None:
    import transformers

    folder = make(tmp_path, tiny)
    settings = read_json(folder / "preprocessor_config.json")
    processor = getattr(transformers, PROCESSORS[tiny.family]).from_pretrained(folder, local_files_only=True)
    config = read_json(folder / "config.json")
    family = find_family(config)
    assert family.adjust is not None
    layout = family.adjust(family.read(config), settings).layout
    normal = image_settings(settings, family.processors)
    for number, size in enumerate(SIZES):
        image = random_image(number, size)
        wanted = processor([image], return_tensors="np")
        assert layout.count(*size) == wanted["image_grid_thw"].prod() // 4
        patches = patches_of(np.asarray(layout.views(image, normal)[0]), tiny.patch, tiny.family)
        pixels = wanted["pixel_values"].reshape(len(patches), -1)
        assert_near(patches, pixels, 1e-6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_known_sizes(name: str) -> None:
    size = config_size(PUBLISHED[name], name)
    assert (size.decoder, size.parameters) == (KNOWN[name].decoder, KNOWN[name].parameters)


@pytest.mark.sampled
@pytest.mark.parametrize("names", ["hub", "saved"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_paddleocr_is_tied_where_config_json_says_so(tmp_path: Path, names: str, tied: bool) -> None:
    folder = make(tmp_path / "checkpoint", replace(paddleocr_vl.PADDLE, names=names, tied=tied))
    plan = plan_export(ExportOptions(str(folder), (), "fp32"))
    config = read_json(folder / "config.json")
    assert config_size(config, "tiny").decoder.tied == plan.config.text.tied == tied
    assert not [line for line in plan.warnings if "ties the head" in line]
    if names == "saved":  # older releases of transformers wrote it into the text model's settings
        config["text_config"]["tie_word_embeddings"] = True
        assert config_size(config | {"tie_word_embeddings": False}, "tiny").decoder.tied


def test_tensors_for_several_tokens_at_a_time_stay_out_of_the_bundle(tmp_path: Path) -> None:
    folder = make(tmp_path / "checkpoint", glm_ocr.GLM_OCR)
    stored = plan_export(ExportOptions(str(folder), (), "fp32")).weights.stored
    assert "text.layers.16.eh_proj.weight" in open_checkpoint(str(folder)).tensors
    assert not [name for name in stored if ".16." in name]


@pytest.mark.slow
def test_withdrawal_is_refused_by_default_for_readers_alone(tmp_path: Path) -> None:
    for tiny in TINIES:
        folder = str(make(tmp_path / tiny.family, tiny))
        if tiny is lfm3_vl.LFM3:
            assert plan_export(ExportOptions(folder, (3,), "fp32")).ks == (3,)
            continue
        with pytest.raises(RequestError, match="reads documents"):
            plan_export(ExportOptions(folder, (3,), "fp32"))


def test_rows_that_stand_in_another_order_are_read_in_theirs(tmp_path: Path) -> None:
    matrix = torch.arange(8.0)[:, None] * torch.ones(8, 3)
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    info = replace(read_header(tmp_path / "model.safetensors").tensors["matrix"], order=(0, 2, 1, 3))
    assert info.moved
    assert read_bits(info)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert read_bits(info, slice(1, 6))[:, 2].tolist() == [2, 1, 3, 4, 6]
    assert read_bits(info, np.array([5, 2]))[:, 0].tolist() == [6, 1]
    part = replace(info, shape=(4, 3), order=(1, 0), spread=(2, 4))  # the first two of each four rows
    assert read_bits(part)[:, 0].tolist() == [1, 0, 5, 4]


def test_neighbours_that_rotate_become_halves_of_a_head(tmp_path: Path) -> None:
    tiny = replace(glm_ocr.GLM_OCR, head_dim=16, partial=0.5)
    folder = make(tmp_path, tiny)
    name = "text.layers.0.self_attn.q_proj.weight"
    arranged = CheckpointWeights(open_checkpoint(str(folder))).read(name)
    source = read_header(folder / "model.safetensors").tensors["model.language_model.layers.0.self_attn.q_proj.weight"]
    stored = read_bits(source)
    order = [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    np.testing.assert_array_equal(arranged[:16].numpy(), stored[order])
    np.testing.assert_array_equal(arranged[16:32].numpy(), stored[16:][order])


@pytest.mark.parametrize("size", [{"shortest_edge": 12544}, {"shortest_edge": 12543, "longest_edge": 99998}, 224])
def test_a_size_that_is_not_two_even_numbers_is_refused(size: Any) -> None:
    config = PUBLISHED["glm-ocr"]
    family = find_family(config)
    assert family.adjust is not None
    with pytest.raises(CheckpointError, match="it must have two even numbers of pixels"):
        family.adjust(read_config(config), {"size": size})


def test_a_layout_that_enlarges_in_an_unknown_way_is_refused() -> None:
    with pytest.raises(BundleError, match="enlarges small images by 'twice', unknown to this vtx, which has floored"):
        Native(14, 2, 784, 1568, small="twice")


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("text_config", {"layer_types": ["conv"] * 24}, "none of this model's layers has attention"),
        ("text_config", {"layer_types": ["linear_attention"] * 24}, "the kind of layers 'linear_attention'"),
        ("text_config", {"num_key_value_heads": 3}, "16 heads are not a multiple of 3"),
        ("vision_config", {"layer_types": ["sliding_attention"] * 14}, "the kind of the tower's layers 'sliding_att"),
        ("vision_config", {"conv_kernel_size": 2}, "convolutions of 2 and 14 of 14 layer_types does not fit"),
        ("vision_config", {"temporal_patch_size": 1}, "temporal_patch_size 1 is not supported; vtx supports 2"),
    ],
)
def test_settings_of_lfm3_that_vtx_does_not_compute_are_refused(part: str, change: dict[str, Any], reason: str) -> None:
    config = PUBLISHED["lfm3-vl-2b"]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        read_config({**config, part: {**config[part], **change}})


def test_a_checkpoint_of_minicpm_4_7_is_refused_with_what_to_use() -> None:
    with pytest.raises(UnsupportedModelError, match=r"places on a canvas.*use MiniCPM-V 4\.6"):
        read_config({"model_type": "minicpmv4_7", "architectures": ["MiniCPMV4_7ForConditionalGeneration"]})
