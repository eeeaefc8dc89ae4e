"""Families with Pixtral's tower: settings that change what is computed, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.families.pixtral import LIGHTON, MINISTRAL3, MISTRAL3, PIXTRAL
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import edited
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.families.mistral3 import FAMILY
from vtx.exporter.checkpoint.text import TextOptions, read_text
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError, VtxError
from vtx.runtime.vision.layouts.longest import LongestEdge


@pytest.fixture
def planned(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Callable[..., Plan]:
    """The plan of a checkpoint with other settings in one of its files."""

    def plan(tiny: Any, name: str, changes: dict[str, Any], part: str | None = None) -> Plan:
        return plan_export(ExportOptions(str(edited(tiny_checkpoint(tiny), tmp_path / "edited", name, changes, part))))

    return plan


@pytest.mark.parametrize(
    ("tiny", "changes", "part", "error", "reason"),
    [
        (PIXTRAL, {"vision_feature_select_strategy": "default"}, None, UnsupportedModelError, "'default' with 1 layer"),
        (MISTRAL3, {"vision_feature_layer": [-1, -2]}, None, UnsupportedModelError, "2 layers of a Pixtral tower"),
        (PIXTRAL, {"rope_theta": 5e5}, "vision_config", UnsupportedModelError, "rope_theta 500000.0 and heads of 16"),
        (PIXTRAL, {"num_attention_heads": 16}, "vision_config", UnsupportedModelError, "heads of 2 is not"),
        (PIXTRAL, {"image_size": 16_000}, "vision_config", CheckpointError, "image_size: layout 'longest' has edges"),
        (MISTRAL3, {"spatial_merge_size": 1}, None, UnsupportedModelError, "spatial_merge_size 1 is not supported"),
        (MISTRAL3, {"model_type": "mistral4"}, "text_config", UnsupportedModelError, "text model 'mistral4'"),
    ],
)
def test_a_configuration_that_vtx_does_not_compute_is_refused(
    planned: Callable[..., Plan], tiny: Any, changes: Any, part: str | None, error: type[VtxError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        planned(tiny, "config.json", changes, part)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, UnsupportedModelError, "supports PixtralImageProcessor"),
        ({"size": {"height": 64, "width": 64}}, UnsupportedModelError, "PixtralImageProcessor with longest_edge"),
        ({"size": {"longest_edge": "64"}}, CheckpointError, "longest_edge is '64', not a number"),
        ({"size": {"longest_edge": 4}}, CheckpointError, "at least one token must fit"),
        ({"do_center_crop": True}, UnsupportedModelError, "only resizes its images"),
    ],
)
def test_another_image_processor_is_refused(
    planned: Callable[..., Plan], changes: Any, error: type[VtxError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        planned(PIXTRAL, "preprocessor_config.json", changes)


def test_the_image_processor_states_the_longest_edge(planned: Callable[..., Plan]) -> None:
    plan = planned(MISTRAL3, "preprocessor_config.json", {"size": {"longest_edge": 50}})
    assert plan.config.layout == LongestEdge(8, 2, 50, 16, marks=True)
    assert plan.config.layout.max_tokens == 16


@pytest.mark.parametrize(("beta", "positions"), [(0.1, MINISTRAL3.context), (0.0, 4096)])
def test_ministral_s_context_ends_where_its_queries_begin_to_grow(
    tiny_checkpoint: Checkpoints, tmp_path: Path, beta: float, positions: int
) -> None:
    source = tiny_checkpoint(MINISTRAL3)
    rope = read_json(source / "config.json")["text_config"]["rope_parameters"]
    settings = {"max_position_embeddings": 4096, "rope_parameters": rope | {"llama_4_scaling_beta": beta}}
    checkpoint = str(edited(source, tmp_path / "edited", "config.json", settings, "text_config"))
    assert plan_export(ExportOptions(checkpoint)).config.text.max_positions == positions
    with pytest.raises(RequestError, match=f"the model has {positions} positions"):
        plan_export(ExportOptions(checkpoint, max_context=positions + 1))


@pytest.mark.parametrize("architecture", ["LightOnOCRForConditionalGeneration", "LightOnOcrForConditionalGeneration"])
def test_lightonocr_is_known_by_the_names_of_its_published_files(
    tiny_checkpoint: Checkpoints, planned: Callable[..., Plan], architecture: str
) -> None:
    """They say mistral3, and have settings of it that transformers' class does not read."""
    token = read_json(tiny_checkpoint(LIGHTON) / "config.json")["image_token_id"]
    names = {"model_type": "mistral3", "architectures": [architecture], "image_token_id": None}
    plan = planned(LIGHTON, "config.json", names | {"image_token_index": token, "vision_feature_layer": -2})
    usual = plan_export(ExportOptions(str(tiny_checkpoint(LIGHTON))))
    assert plan.config == usual.config
    assert plan.config.layout == LongestEdge(8, 2, 96, 8, marks=False)


def test_lightonocr_s_pages_are_multiples_of_a_patch_or_of_a_token(planned: Callable[..., Plan]) -> None:
    with pytest.raises(UnsupportedModelError, match="patch_size is 12; vtx supports the tower's, 8, and"):
        planned(LIGHTON, "preprocessor_config.json", {"patch_size": 12})


def test_lightonocr_keeps_its_image_tokens_without_the_user_s_word(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(RequestError, match="this model reads documents"):
        plan_export(ExportOptions(str(tiny_checkpoint(LIGHTON)), (3,)))


@pytest.mark.slow
@pytest.mark.parametrize(("release", "patterns"), [("4.50.0", 1), ("5.0.0", 0)])
def test_words_of_mistral_3_are_split_as_in_training_whatever_release_wrote_its_tokenizer(
    tiny_checkpoint: Checkpoints, tmp_path: Path, release: str, patterns: int
) -> None:
    """Transformers knows a tokenizer of Mistral's by its size, the model_type and the release."""
    from transformers import AutoTokenizer

    folder = edited(tiny_checkpoint(MISTRAL3), tmp_path / "edited", "config.json", {"transformers_version": release})
    spec = read_json(folder / "tokenizer.json")
    spec["model"]["vocab"] |= {token["content"]: token["id"] for token in spec["added_tokens"]}
    spec["model"]["vocab"] |= {f"filler {number}": number for number in range(MISTRAL3.vocab, 100_100)}
    write_json(folder / "tokenizer.json", spec)
    config = read_json(folder / "config.json")
    options = TextOptions(fix_mistral_regex=FAMILY.fix_mistral_regex)
    tokenizer, _, _ = read_text(folder, config["image_token_index"], config["text_config"], config, options)
    pattern = AutoTokenizer.from_pretrained(folder, local_files_only=True, fix_mistral_regex=True).backend_tokenizer
    split = json.loads(tokenizer)["pre_tokenizer"]
    assert split == json.loads(pattern.to_str())["pre_tokenizer"]
    assert [part["type"] for part in split.get("pretokenizers", ())].count("Split") == patterns
