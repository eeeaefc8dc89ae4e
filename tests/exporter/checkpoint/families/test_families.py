"""Families declare what differs; what a checkpoint of theirs says wrongly is refused by name."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest

from tests.support.json_files import read_json
from tests.support.tiny import ARCHITECTURES, Tiny, make
from vtx.exporter.checkpoint import families
from vtx.exporter.checkpoint.families.registry import FAMILIES, REFUSED, find_family, read_config
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.processor import image_settings, read_image_processor
from vtx.exporter.checkpoint.spec import config_size
from vtx.exporter.graphs.vision import vision_tensors
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.tools.estimate.sizes import KNOWN

NEXT = Tiny(family="llava_next")
TOWER = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
TOWER |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}


def settings(folder: Path, name: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / name)
    return found


def test_every_file_of_a_family_is_registered_and_has_a_tiny_checkpoint() -> None:
    found = walk_packages(families.__path__, f"{families.__name__}.")
    modules = [import_module(module.name) for module in found]
    declared = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    tiny = {
        **ARCHITECTURES,
        "lerobot.smolvla": "SmolVLAPolicy",
        "lerobot.pi05": "PI05Policy",
        "lerobot.pi0": "PI0Policy",
    }
    assert {family.model_type for family in declared} == {family.model_type for family in FAMILIES} == set(tiny)
    assert {family.model_type: family.architecture for family in FAMILIES} == tiny


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_is_not_exported_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        find_family({"model_type": kind})


PUBLISHED = {  # keys and values of the published config.json that tell the model
    "gemma-3n-E4B-it": {
        "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": {"model_type": "gemma3n_text", "altup_num_inputs": 4, "laurel_rank": 64},
        "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
    },
    "gemma-4-12B-it": {
        "model_type": "gemma4_unified", "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": {"model_type": "gemma4_unified_text", "attention_k_eq_v": True, "hidden_size": 3840},
    },
    "gemma-4-26B-A4B-it": {
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {"model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
    },
    "MiniCPM-V-4.7": {"model_type": "minicpmv4_7", "architectures": ["MiniCPMV4_7ForConditionalGeneration"]},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_that_is_refused_is_so_in_one_sentence(name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"^[^;]+: [^;]+; use [^;]+$|^[^;]+: [^;]+ is not supported; use "
    ) as e:
        read_config(PUBLISHED[name])
    assert len(str(e.value)) < 260


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.model_type))
def test_a_checkpoint_that_mixes_families_is_refused(family: Family) -> None:
    # those in their authors' layout are known by their architecture alone
    other = next(kind for kind in FAMILIES if kind is not family and kind.original is None)
    with pytest.raises(UnsupportedModelError, match="vtx exports"):
        find_family({"model_type": family.model_type, "architectures": [other.architecture]})


def test_an_image_processor_of_another_family_is_refused(tmp_path: Path) -> None:
    single, tiled = make(tmp_path / "single", Tiny()), make(tmp_path / "tiled", NEXT)
    for folder, of in ((single, tiled), (tiled, single)):
        with pytest.raises(UnsupportedModelError, match=r"image processor .* is not supported"):
            image_settings(read_image_processor(folder), find_family(settings(of)).processors)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("vision_aspect_ratio", "anyres", UnsupportedModelError),
        ("vision_aspect_ratio", "anyres_max_99", CheckpointError),
        ("vision_config", TOWER, UnsupportedModelError),
        ("vision_feature_select_strategy", "default", UnsupportedModelError),
    ],
)
def test_what_onevision_does_not_have_is_refused_by_name(
    tmp_path: Path, name: str, value: Any, error: type[Exception]
) -> None:
    tiny = Tiny(family="llava_onevision", vision="siglip", text="qwen2", tokenizer="bytes", select="full")
    config = settings(make(tmp_path / "checkpoint", tiny)) | {name: value}
    with pytest.raises(error, match="siglip with 'full'" if name != "vision_aspect_ratio" else name):
        read_config(config)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "points",
    [
        [],
        [[56]],
        [["56", 112]],
        [[True, 56]],
        [[57, 112]],
        [[0, 56]],
        [[56 * 65, 56]],
        [[10**30, 56]],
        [[56, 112]] * 129,
        "[[56, 112]]",
    ],
    ids=lambda points: str(points)[:40],
)
def test_resolutions_that_are_none_are_refused(tmp_path: Path, points: Any) -> None:
    config = settings(make(tmp_path / "checkpoint", NEXT)) | {"image_grid_pinpoints": points}
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(config)


def test_tiles_without_a_token_a_patch_are_refused(tmp_path: Path) -> None:
    config = settings(make(tmp_path / "checkpoint", NEXT)) | {"vision_feature_select_strategy": "full"}
    with pytest.raises(UnsupportedModelError, match="does not give one token a patch"):
        read_config(config)


def test_the_published_sizes_of_llava_next_are_those_that_plans_know() -> None:
    text = {"model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "num_hidden_layers": 32}
    text |= {"intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
    config = {"model_type": "llava_next", "text_config": text, "vision_config": TOWER, "image_token_index": 32000}
    found, known = config_size(config, "llava-next-7b"), KNOWN["llava-next-7b"]
    assert (found.decoder, found.vision) == (known.decoder, known.vision)


GRANITE_TEXT = {"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40}
GRANITE_TEXT |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49156, "embedding_multiplier": 12.0}
GRANITE_TEXT |= {"attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8.0}
GRANITE = {
    "model_type": "llava_next", "text_config": GRANITE_TEXT, "image_token_index": 49155, "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
    },
    "vision_feature_layer": [-24, -20, -12, -1], "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[width, height] for height, width in KNOWN["granite-vision-3.3-2b"].layout.resolutions],
}  # fmt: skip


def test_the_published_sizes_of_granite_vision_are_those_that_plans_know() -> None:
    found, known = config_size(GRANITE, "granite-vision-3.3-2b"), KNOWN["granite-vision-3.3-2b"]
    assert (found.decoder, found.vision, found.layout) == (known.decoder, known.vision, known.layout)
    unused = 15_240_656  # the tower's pooling head and its last norm
    assert known.parameters + unused + 2048 == 2_975_396_928, "of the model card; 2048 are a newline's"


@pytest.mark.parametrize("layers", [[-24, 28], [-29], []])
def test_feature_layers_that_the_tower_does_not_have_are_refused_with_their_number(layers: list[Any]) -> None:
    with pytest.raises(CheckpointError, match=r"outside the tower's 28 hidden states|is an empty list"):
        read_config(GRANITE | {"vision_feature_layer": layers})


@pytest.mark.parametrize(
    "name", ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, float("nan")])
def test_multipliers_that_are_none_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=name):
        read_config(GRANITE | {"text_config": GRANITE_TEXT | {name: value}})


FASTVIT = {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 3072}
FASTVIT |= {"model_args": {"inference_mode": True}}
FAST_VLM = {
    "model_type": "fast_vlm", "image_seq_length": 256, "image_token_index": 151646, "vision_config": FASTVIT,
    "text_config": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 152000, "tie_word_embeddings": True,
    },
}  # fmt: skip


def test_the_published_sizes_of_fastvlm_are_those_that_plans_know() -> None:
    found, known = config_size(FAST_VLM, "fastvlm-0.5b"), KNOWN["fastvlm-0.5b"]
    assert (found.decoder, found.vision, found.layout) == (known.decoder, known.vision, known.layout)
    assert known.vision is not None
    shapes = [shape for name, shape in vision_tensors(read_config(FAST_VLM))]
    assert known.vision.parameters == sum(math.prod(shape) for shape in shapes)
    tower = known.vision.parameters - 896 * (3072 + 1 + 896 + 1)
    assert round(tower / 1e6) == 123, "timm's fastvit_mci3 without its classifier; FastVLM's paper says 125 with it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "fastvit_sa12"}, "the vision tower 'fastvit_sa12' is not supported in FastVLM"),
        ({"model_args": {}}, "inference_mode true, whose branches are merged"),
        ({"model_args": {"inference_mode": True, "mlp_ratios": [3] * 5}}, "no other settings than layers, embed_dims"),
        (
            {"model_args": {"inference_mode": True, "layers": [1, 1, 1, 1]}},
            r"layers .* is \[1, 1, 1, 1\], not 5 numbers",
        ),
        ({"model_args": {"inference_mode": True, "layers": [1, 1, 1, 1, 0]}}, "not 5 numbers from 1 to 512"),
        ({"model_args": {"inference_mode": True, "layers": 3}}, "layers of the vision tower is 3, not 5 numbers"),
        (
            {"model_args": {"inference_mode": True, "embed_dims": [96, 192, 384, 700, 1400]}},
            "multiple of the one before",
        ),
        ({"hidden_size": 1536}, "hidden_size 1536; .* hidden_size twice the last"),
    ],
)
def test_towers_of_fastvlm_that_are_not_built_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        read_config(FAST_VLM | {"vision_config": FASTVIT | changes})


@pytest.mark.parametrize("count", [0, -1, 255, 1 << 20])
def test_image_tokens_of_fastvlm_that_make_no_square_are_refused(count: int) -> None:
    with pytest.raises(CheckpointError, match=f"image_seq_length is {count}, not the tokens of a square image"):
        read_config(FAST_VLM | {"image_seq_length": count})
