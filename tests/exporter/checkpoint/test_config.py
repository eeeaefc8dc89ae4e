"""What a checkpoint's config.json may say, and what is refused by name before anything is written."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError, VtxError

TEXTS = ("llama", "mistral", "qwen2", "qwen3")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = read_json(folder / "config.json")
    return value


@pytest.fixture
def configs(tiny_checkpoint: Checkpoints) -> Callable[..., dict[str, Any]]:
    """`configs(text)`: the config.json of a sound checkpoint, to be changed."""
    return lambda text="llama": config_of(tiny_checkpoint(Tiny(text=text)))


def changed(config: dict[str, Any], *way: str, to: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    part = config
    for step in way[:-1]:
        part = part[step]
    part[way[-1]] = to
    return config


def refused(config: dict[str, Any], error: type[VtxError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        read_config(config)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def plan(folder: Path, **options: Any) -> Plan:
    return plan_export(ExportOptions(str(folder), **{"precision": "fp32", **options}))


@pytest.mark.parametrize("name", ["vision_feature_layer", "vision_feature_layers"])
def test_vipllava_s_layers_are_read_by_either_name(name: str, tiny_checkpoint: Checkpoints) -> None:
    """Each release of transformers knows one of them, and takes its default where the other one stands."""
    config = config_of(tiny_checkpoint(Tiny(family="vipllava", feature_layer=(-1, 2))))
    layers = config.pop("vision_feature_layers", None) or config.pop("vision_feature_layer")
    assert read_config(config | {name: layers}).feature_layers == (4, 2)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_the_sizes_are_read_as_they_stand(configs: Any, text: str) -> None:
    config = read_config(configs(text))
    assert (config.text.family, config.text.layers, config.text.hidden, config.text.ffn) == (text, 8, 64, 96)
    assert (config.text.heads, config.text.kv_heads, config.text.head_dim, config.text.vocab) == (4, 2, 16, 320)
    assert (config.vision.layers, config.vision.hidden, config.vision.image, config.vision.patch) == (4, 32, 56, 14)
    assert (config.layout.max_tokens, config.image_token_id, config.feature_layers) == (16, 319, (3,))
    assert (config.text.qkv_bias, config.text.o_bias, config.text.qk_norm) == (text == "qwen2", False, text == "qwen3")


def test_the_public_7b_config_is_read_with_the_defaults_it_leaves_out() -> None:
    config = read_config(
        {
            "model_type": "llava",
            "image_token_index": 32000,
            "projector_hidden_act": "gelu",
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
                "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
            },
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        }
    )  # fmt: skip
    assert (config.text.kv_heads, config.text.head_dim, config.text.max_positions) == (32, 128, 4096)
    assert config.feature_layers == (23,)


@pytest.mark.parametrize(
    ("value", "layers"),
    [(-1, (4,)), (0, (0,)), (4, (4,)), (-5, (0,)), ([-2], (3,)), ([1, -1], (1, 4)), ([2, 2], (2, 2))],
)
def test_feature_layers_count_from_either_end(configs: Any, value: Any, layers: tuple[int, ...]) -> None:
    assert read_config(changed(configs(), "vision_feature_layer", to=value)).feature_layers == layers


@pytest.mark.parametrize(("scaling", "low"), [({"type": "linear", "factor": 4.0}, 0.25), (None, 1.0)])
def test_rope_rates_follow_the_scaling(configs: Any, scaling: Any, low: float) -> None:
    rope = read_config(changed(configs(), "text_config", "rope_scaling", to=scaling)).text.rope
    want = low * 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rope.frequencies, want, rtol=1e-6)


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 9.0, 10.0, 11.0, 12.0], "original_max_position_embeddings": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 8},
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96,
            "mscale": 1.0, "mscale_all_dim": 0.7,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96, "attention_factor": 1.5},
        LONGROPE,
        LONGROPE | {"factor": 6.0},
        LONGROPE | {"factor": 0.5},
        LONGROPE | {"attention_factor": 1.2},
    ],
)  # fmt: skip
def test_rope_and_its_scale_are_those_of_transformers(configs: Any, scaling: Any) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = changed(configs(), "text_config", "rope_scaling", to=scaling)
    rope = read_config(config).text.rope
    text = LlamaConfig(**config["text_config"])
    rates, scale = ROPE_INIT_FUNCTIONS[rope.kind](text, None)
    np.testing.assert_allclose(rope.frequencies, rates.numpy(), rtol=1e-6)
    assert rope.scale == pytest.approx(scale)


@pytest.mark.parametrize("wrong", [{"factor": "4"}, {"beta_fast": 1, "beta_slow": 2}, {"attention_factor": 0}])
def test_yarn_with_numbers_that_make_no_sense_is_refused(configs: Any, wrong: Any) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | wrong
    assert next(iter(wrong)) in refused(changed(configs(), "text_config", "rope_scaling", to=scaling))


@pytest.mark.parametrize(
    "wrong",
    [{"short_factor": [1.0] * 7}, {"long_factor": [1.0] * 9}, {"short_factor": [0.0] * 8}, {"factor": "4"},
     {"attention_factor": 0}, {"original_max_position_embeddings": 1}],
)  # fmt: skip
def test_longrope_with_numbers_that_make_no_sense_is_refused(configs: Any, wrong: Any) -> None:
    assert next(iter(wrong)) in refused(changed(configs(), "text_config", "rope_scaling", to=LONGROPE | wrong))


def test_the_context_ends_where_longrope_changes_its_factors_in_transformers(
    tiny_checkpoint: Checkpoints, configs: Any
) -> None:
    folder = tiny_checkpoint(Tiny(rope="longrope"))
    assert plan(folder).max_context == 200
    with pytest.raises(RequestError, match="201; the model has 200 positions, beyond which its longrope rotates all"):
        plan(folder, max_context=201)
    without = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}
    config = changed(configs(), "text_config", "rope_scaling", to=without)
    assert read_config(config).text.max_positions == config["text_config"]["max_position_embeddings"]
    named = changed(config, "text_config", "original_max_position_embeddings", to=64)  # as Phi-3 has it
    text = read_config(named).text
    assert text.max_positions == 64
    assert text.rope.scale == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_the_context_ends_where_mistral_s_sliding_window_does(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint(Tiny(text="mistral", sliding_window=64))
    assert plan(folder).max_context == 64
    with pytest.raises(RequestError, match="64"):
        plan(folder, max_context=65)


def test_a_window_that_no_layer_uses_does_not_limit_the_context(configs: Any) -> None:
    config = changed(configs("qwen2"), "text_config", "sliding_window", to=32)
    assert read_config(changed(config, "text_config", "use_sliding_window", to=False)).text.max_positions == 256
    used = changed(config, "text_config", "use_sliding_window", to=True)
    assert read_config(changed(used, "text_config", "max_window_layers", to=4)).text.max_positions == 32


def test_unknown_keys_are_ignored(configs: Any) -> None:
    config = configs()
    more = changed(changed(config, "surprise", to={"a": 1}), "text_config", "another", to=[1])
    assert read_config(more) == read_config(config)


# ---- what is refused by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "phi3", "opt", "qwen2_moe", "mixtral", "gpt2", "../llama", ""])
def test_other_text_models_are_refused_by_name(configs: Any, family: str) -> None:
    message = refused(changed(configs(), "text_config", "model_type", to=family), UnsupportedModelError)
    assert repr(family) in message
    assert "qwen2" in message


@pytest.mark.parametrize("family", ["siglip2_vision_model", "dinov2", "vit", "mlcd_vision_model", "clip"])
def test_other_towers_are_refused_by_name(configs: Any, family: str) -> None:
    message = refused(changed(configs(), "vision_config", "model_type", to=family), UnsupportedModelError)
    assert repr(family) in message
    assert "siglip" in message


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["su", "mrope"])
def test_other_rope_variants_are_refused_by_name(configs: Any, key: str, kind: str) -> None:
    scaling = {key: kind, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    scaling["original_max_position_embeddings"] = 128
    assert kind in refused(changed(configs(), "text_config", "rope_scaling", to=scaling), UnsupportedModelError)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}},
    ],
    ids=["partial", "per layer"],
)
def test_rope_that_vtx_would_compute_otherwise_is_refused(configs: Any, parameters: dict[str, Any]) -> None:
    refused(changed(configs(), "text_config", "rope_parameters", to=parameters), UnsupportedModelError)


@pytest.mark.parametrize("head_dim", [4, 12, 20, -8])
def test_a_head_dim_that_is_no_multiple_of_eight_is_refused(configs: Any, head_dim: int) -> None:
    message = refused(changed(configs(), "text_config", "head_dim", to=head_dim), UnsupportedModelError)
    assert str(head_dim) in message


def test_a_tower_that_does_not_see_rgb_is_refused(configs: Any) -> None:
    assert "4 channels" in refused(changed(configs(), "vision_config", "num_channels", to=4), UnsupportedModelError)


@pytest.mark.parametrize(
    "way", [("projector_hidden_act",), ("text_config", "hidden_act"), ("vision_config", "hidden_act")]
)
def test_an_unknown_activation_is_refused_by_name(
    tiny_checkpoint: Checkpoints, tmp_path: Path, way: tuple[str, ...]
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "copy"))
    write_json(folder / "config.json", changed(config_of(folder), *way, to="wobble"))
    with pytest.raises(VtxError, match="wobble"):
        plan(folder)


def test_quantisation_that_is_not_read_is_refused_by_name(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "copy"))
    settings_ = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    write_json(folder / "config.json", {**config_of(folder), "quantization_config": settings_})
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        plan(folder)


@pytest.mark.parametrize("strategy", ["cls", "patch", "", 1, None, ["default"]])
def test_an_unknown_select_strategy_is_refused(configs: Any, strategy: Any) -> None:
    assert "select_strategy" in refused(changed(configs(), "vision_feature_select_strategy", to=strategy))


def test_an_image_processor_of_another_size_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "copy"))
    path = folder / "preprocessor_config.json"
    processor = read_json(path)
    processor |= {"size": {"shortest_edge": 70}, "crop_size": {"height": 70, "width": 70}}
    write_json(path, processor)
    with pytest.raises(UnsupportedModelError, match=r"70 x 70.*56 x 56"):
        plan(folder)


# ---- sizes that lie --------------------------------------------------------------------------------------------------

SIZES = [
    ("text_config", name)
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
                 "num_key_value_heads", "max_position_embeddings", "head_dim")
] + [
    ("vision_config", name)
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "image_size",
                 "patch_size")
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("way", SIZES, ids=".".join)
def test_a_size_that_is_none_is_refused(configs: Any, way: tuple[str, str]) -> None:
    for text in TEXTS:
        for value in ("8", -1, -(10**20), True, 1.5, [8], {"a": 8}):
            refused(changed(configs(text), *way, to=value))


@pytest.mark.parametrize("way", [way for way in SIZES if way[1] != "head_dim"], ids=".".join)
def test_zero_is_no_size(configs: Any, way: tuple[str, str]) -> None:
    refused(changed(configs(), *way, to=0))


@pytest.mark.sampled
@pytest.mark.parametrize("way", SIZES, ids=".".join)
def test_an_absurd_size_is_refused_at_once(configs: Any, way: tuple[str, str]) -> None:
    for text in TEXTS:
        for value in (10**9, 10**400):
            config, start = changed(configs(text), *way, to=value), time.thread_time()
            refused(config)
            assert time.thread_time() - start < 1


@pytest.mark.parametrize("part", [(), ("text_config",), ("vision_config",)])
def test_a_billion_labels_take_no_time(configs: Any, part: tuple[str, ...]) -> None:
    start = time.thread_time()
    read_config(changed(configs(), *part, "num_labels", to=10**9))
    assert time.thread_time() - start < 1


@pytest.mark.parametrize(
    ("way", "value", "named"),
    [
        (("text_config", "num_key_value_heads"), 3, "4 heads are not a multiple of 3"),
        (("vision_config", "num_attention_heads"), 3, "not a multiple of"),
        (("vision_config", "patch_size"), 57, "smaller than patch_size 57"),
        (("image_token_index",), 320, "320"),
        (("image_token_index",), -1, "-1"),
        (("image_token_index",), "319", "image_token_index"),
        (("vision_feature_layer",), 5, "5 hidden states"),
        (("vision_feature_layer",), -6, "5 hidden states"),
        (("vision_feature_layer",), [1, 5], "5 hidden states"),
        (("vision_feature_layer",), [], "empty"),
        (("vision_feature_layer",), [True], "vision_feature_layer"),
        (("vision_feature_layer",), 10**400, "hidden states"),
        (("text_config", "rms_norm_eps"), 0.0, "rms_norm_eps"),
        (("text_config", "rms_norm_eps"), -1.0, "rms_norm_eps"),
        (("text_config", "rms_norm_eps"), float("inf"), "rms_norm_eps"),
        (("vision_config", "layer_norm_eps"), 1e300, "layer_norm_eps"),
        (("text_config", "rope_theta"), 0, "rope_theta"),
        (("text_config", "rope_theta"), -1e4, "rope_theta"),
        (("text_config", "rope_theta"), 1e300, "rope_theta"),
        (("text_config", "rope_theta"), 10**400, "rope_theta"),
        (("text_config", "rope_scaling"), {"rope_type": "linear", "factor": 0}, "factor"),
        (("text_config", "rope_scaling"), {"rope_type": "linear", "factor": "4"}, "factor"),
        (("text_config", "rope_scaling"), {"rope_type": "linear", "factor": 1e-300}, "factor"),
        (("text_config", "rope_scaling"), {"rope_type": "linear"}, "factor"),
        (("text_config", "rope_scaling"), {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64}, "high_freq_factor"),
        (("text_config",), "llama", "text_config is a"),
        (("vision_config",), [1], "vision_config is a"),
    ],
)  # fmt: skip
def test_values_that_lie_are_named(configs: Any, way: tuple[str, ...], value: Any, named: str) -> None:
    assert named in refused(changed(configs(), *way, to=value))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("way", "value", "named"),
    [
        (("text_config", "num_hidden_layers"), 9, "9 layers"),
        (("vision_config", "num_hidden_layers"), 6, "6 layers"),
        (("text_config", "hidden_size"), 128, "128"),
        (("text_config", "vocab_size"), 640, "640"),
        (("text_config", "attention_bias"), True, "bias is missing"),
        (("text_config", "model_type"), "qwen2", "bias is missing"),
        (("vision_config", "patch_size"), 28, "28"),
        (("vision_feature_layer",), [-2, -1], "64"),
    ],
)
def test_a_config_that_promises_more_than_the_shards_hold_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path, way: tuple[str, ...], value: Any, named: str
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "copy"))
    write_json(folder / "config.json", changed(config_of(folder), *way, to=value))
    with pytest.raises(CheckpointError, match=named):
        plan(folder)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), value=SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=8), SCALARS))
def test_one_value_replaced_gives_a_model_or_a_checkpoint_error(
    tiny_checkpoint: Checkpoints, data: st.DataObject, value: Any
) -> None:
    config = config_of(tiny_checkpoint())
    parts = [(), ("text_config",), ("vision_config",)]
    ways = [(*part, key) for part in parts for key in (config[part[0]] if part else config)]
    try:
        read_config(changed(config, *data.draw(st.sampled_from(ways)), to=value))
    except CheckpointError as e:
        assert "\n" not in str(e)  # noqa: PT017 - it need not be raised
