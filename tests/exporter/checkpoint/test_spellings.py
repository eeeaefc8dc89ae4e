"""Values of published configurations that transformers ignores: the model that vtx reads is the same with them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.minicpm import MINICPM
from tests.support.families.openvla import TinyOpenVLA, config_of, processor_of, with_towers
from tests.support.families.qwen import QWEN3
from tests.support.families.smolvlm import IDEFICS, SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.tiny import Tiny
from vtx.exporter.checkpoint.families.openvla import FAMILY as OPENVLA
from vtx.exporter.checkpoint.families.qwen.qwen2_5_vl import FAMILY as QWEN2_5_VL
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS
from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.errors import UnsupportedModelError

IGNORED: list[tuple[Tiny, str, dict[str, Any]]] = [
    (IDEFICS, "vision_config", {"model_type": "idefics3"}),  # transformers 4.46
    (SMOLVLM, "vision_config", {"model_type": "idefics3_vision"}),
    (GEMMA3, "text_config", {"model_type": "gemma3"}),
    (GEMMA3, "text_config", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    (GEMMA4, "text_config", {"model_type": "gemma4"}),
    (GEMMA4, "vision_config", {"model_type": "gemma4"}),
    (MINICPM, "vision_config", {"model_type": "minicpmv4_6"}),
    (MINICPM, "", {"drop_vision_last_layer": True}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("tiny", "part", "values"), IGNORED, ids=lambda value: getattr(value, "family", str(value)))
def test_a_value_that_transformers_ignores_changes_nothing(
    tiny_checkpoint: Checkpoints, tiny: Tiny, part: str, values: dict[str, Any]
) -> None:
    config = read_json(tiny_checkpoint(tiny) / "config.json")
    wanted = read_config(config)
    (config[part] if part else config).update(values)
    assert read_config(config) == wanted


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_text", "qwen3"])
def test_the_model_type_of_qwen_s_text_model_is_not_read(tiny_checkpoint: Checkpoints, kind: str) -> None:
    config = read_json(tiny_checkpoint(QWEN3) / "config.json")
    wanted, text = read_config(config), config["text_config"]
    text["model_type"] = kind
    for name in {"rope_scaling", "rope_parameters"} & text.keys():
        text[name] = {**text[name], "mrope_interleaved": False}
    assert read_config(config) == wanted


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_a_model_type_that_transformers_reads_is_refused_if_it_is_unknown(
    tiny_checkpoint: Checkpoints, part: str
) -> None:
    config = read_json(tiny_checkpoint(Tiny()) / "config.json")
    config[part]["model_type"] = "dinov2"
    with pytest.raises(UnsupportedModelError, match="'dinov2' is not supported; vtx exports"):
        read_config(config)


def test_openvla_s_pixels_have_the_means_of_the_transforms_in_its_file() -> None:
    """The released code keeps the file's transforms, whose numbers were rounded to bfloat16."""
    rounded = [
        {"inplace": False, "mean": [0.484375, 0.455078125, 0.40625], "std": [0.228515625, 0.2236328125, 0.224609375]},
        {"inplace": False, "mean": [0.5] * 3, "std": [0.5] * 3},
    ]
    tiny = TinyOpenVLA()
    patch = with_towers(tiny)
    processor = {**processor_of(tiny), "tvf_normalize_params": rounded}
    model, layout = OPENVLA.read(config_of(tiny)), OPENVLA.original
    patch.undo()
    assert layout is not None
    assert OPENVLA.adjust is not None
    settings, second = layout.processor(config_of(tiny), processor), OPENVLA.adjust(model, processor).vision.beside
    assert settings["image_mean"] == rounded[0]["mean"] != CLIP_DEFAULTS["image_mean"]
    assert settings["image_std"] == rounded[0]["std"]
    assert second is not None
    assert second.pixel_scale == (0.45703125, 0.447265625, 0.44921875)
    with pytest.raises(UnsupportedModelError, match="llm_backbone_id 'phi-2-3b' is not supported"):
        OPENVLA.read({**config_of(tiny), "llm_backbone_id": "phi-2-3b"})


def test_the_first_files_of_qwen2_5_vl_name_its_image_processor_otherwise() -> None:
    settings = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    named = {**settings, "image_processor_type": "Qwen2_5_VLImageProcessor"}
    assert image_settings(named, QWEN2_5_VL.processors) == image_settings(settings, QWEN2_5_VL.processors)
