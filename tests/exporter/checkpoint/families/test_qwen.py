"""What Qwen's checkpoints say: published configurations are read, and what is not built is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.families.qwen import PUBLISHED
from tests.support.families.qwen import image_settings as processor_settings
from tests.support.tiny import Tiny, make
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.qwen.qwen2_vl import adjust
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.processor import image_settings
from vtx.exporter.checkpoint.settings import read_settings
from vtx.exporter.checkpoint.spec import config_size
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.native import Native
from vtx.tools.estimate.sizes import KNOWN


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_known_sizes(name: str) -> None:
    found, known = config_size(PUBLISHED[name], name), KNOWN[name]
    assert found.decoder == known.decoder
    assert (found.parameters, found.seeing(512).vision) == (known.parameters, known.seeing(512).vision)


def test_a_published_configuration_is_read_as_it_is_meant() -> None:
    config = read_config(PUBLISHED["qwen2.5-vl-7b"])
    assert config.text.rope.sections == (16, 24, 24)
    assert (config.text.family, config.text.max_positions, config.text.qkv_bias) == ("qwen2", 128000, True)
    assert (config.vision.window, config.vision.full_blocks) == (8, (7, 15, 23, 31))
    assert read_config(PUBLISHED["qwen2-vl-2b"]).text.tied
    config = read_config(PUBLISHED["qwen3-vl-4b"])
    assert (config.text.family, config.text.head_dim, config.text.qk_norm) == ("qwen3", 128, True)
    assert (config.vision.position_grid, config.vision.maps, config.vision.activation) == (
        48, (5, 11, 17), "gelu_pytorch_tanh",
    )  # fmt: skip
    axes = config.text.rope.axes  # time, row and column take turns; time has what is left
    assert axes[:6] == (0, 1, 2, 0, 1, 2)
    assert axes[57:] == (0, 1, 2, 0, 0, 0, 0)
    assert [axes.count(part) for part in range(3)] == [24, 20, 20]


def changed(name: str, value: Any, of_tower: bool) -> Mapping[str, Any]:
    config = dict(PUBLISHED["qwen2.5-vl-7b"])
    if of_tower:
        return {**config, "vision_config": {**config["vision_config"], name: value}}
    return {**config, name: value}


@pytest.mark.parametrize(
    ("name", "value", "of_tower", "error"),
    [
        ("temporal_patch_size", 1, True, UnsupportedModelError),
        ("spatial_merge_size", 3, True, UnsupportedModelError),
        ("in_channels", 4, True, UnsupportedModelError),
        ("rope_theta", 5e5, True, UnsupportedModelError),
        ("window_size", 100, True, CheckpointError),
        ("fullatt_block_indexes", [7, 32], True, CheckpointError),
        ("num_heads", 3, True, CheckpointError),
        ("out_hidden_size", 4096, True, CheckpointError),
        ("depth", 1 << 20, True, CheckpointError),
        ("rope_scaling", {"type": "mrope", "mrope_section": [16, 24]}, False, CheckpointError),
        ("rope_scaling", {"type": "mrope", "mrope_section": [16, 24, 25]}, False, CheckpointError),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}, False, UnsupportedModelError),
        ("image_token_id", 1 << 30, False, CheckpointError),
        ("vision_config", 3, False, CheckpointError),
    ],
)
def test_what_is_not_built_is_refused(name: str, value: Any, of_tower: bool, error: type[Exception]) -> None:
    config = changed(name, value, of_tower)
    if name == "rope_theta":
        config = changed("rope_parameters", {"rope_type": "axial", "rope_theta": value}, True)
    with pytest.raises(error):
        read_config(config)


@pytest.mark.parametrize(
    ("part", "name", "value", "error", "reason"),
    [
        ("text_config", "layer_types", ["linear_attention"] * 36, UnsupportedModelError, "kind 'linear_attention'"),
        ("text_config", "layer_types", ["full_attention"] * 35, CheckpointError, "layer_types"),
        ("text_config", "layer_types", ["wobble"] * 36, CheckpointError, "layer_types"),
        ("vision_config", "deepstack_visual_indexes", [5, 11, 24], CheckpointError, "rising numbers below"),
        ("vision_config", "deepstack_visual_indexes", [11, 5], CheckpointError, "rising numbers below"),
        ("vision_config", "deepstack_visual_indexes", [5, 5], CheckpointError, "rising numbers below"),
        ("vision_config", "deepstack_visual_indexes", [-1], CheckpointError, "rising numbers below"),
        ("vision_config", "deepstack_visual_indexes", None, CheckpointError, "deepstack_visual_indexes"),
        ("vision_config", "num_position_embeddings", 2300, CheckpointError, "is not a square"),
        ("vision_config", "patch_size", [16, 14], CheckpointError, "patch_size"),
    ],
)
def test_what_is_not_built_of_qwen3_vl_is_refused(
    part: str, name: str, value: Any, error: type[Exception], reason: str
) -> None:
    config = dict(PUBLISHED["qwen3-vl-4b"])
    with pytest.raises(error, match=reason):
        read_config({**config, part: {**config[part], name: value}})


def test_more_maps_than_layers_are_refused() -> None:
    config = dict(PUBLISHED["qwen3-vl-4b"])
    with pytest.raises(CheckpointError, match="at most 2 of them"):
        read_config({**config, "text_config": {**config["text_config"], "num_hidden_layers": 2}})


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = make(tmp_path_factory.mktemp("qwen"), Tiny(family="qwen2_vl", text="qwen2", tokenizer="bytes"))
    return read_config(read_settings(folder, "config.json"))


def test_pixels_are_the_image_processors(tiny_config: ModelConfig) -> None:
    found = adjust(tiny_config, processor_settings())
    assert found.layout == Native(14, 2, 4 * 784, 40 * 784)
    assert found.vision.image == 168
    newer = {"size": {"shortest_edge": 784, "longest_edge": 7840}}
    assert adjust(tiny_config, newer).layout == Native(14, 2, 784, 7840)
    assert adjust(tiny_config, {}).layout == Native(14, 2, 3136, 28 * 28 * 1280)


@pytest.mark.parametrize(
    "changes",
    [{"patch_size": 16}, {"merge_size": 1}, {"min_pixels": "many"}, {"max_pixels": 700}, {"size": 3}],
)
def test_an_image_processor_that_does_not_fit_is_refused(tiny_config: ModelConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        adjust(tiny_config, processor_settings() | changes)


@pytest.mark.parametrize("changes", [{"do_resize": False}, {"do_center_crop": True}, {"do_pad": True}])
def test_images_are_only_resized(changes: dict[str, Any]) -> None:
    family = find_family(PUBLISHED["qwen2-vl-2b"])
    assert image_settings(processor_settings(), family.processors).own_size
    with pytest.raises(UnsupportedModelError, match="vtx only resizes its images"):
        image_settings({**processor_settings(), **changes}, family.processors)
