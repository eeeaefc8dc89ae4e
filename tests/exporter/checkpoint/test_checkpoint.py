from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.checkpoints import COMMIT, CONFIG, Q_PROJ, SHARDS, WEIGHTS, make, make_cache, make_sharded, put_index
from tests.support.json_files import write_json
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.loader import INDEX, SINGLE, canonical_name, check_finite
from vtx.exporter.checkpoint.original.pickled import PICKLE
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.bundle.safetensors import read_bits, read_header
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.tools.common.files import read_json_object

# Names


@pytest.mark.parametrize(
    ("source", "canonical"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "text.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "text.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "text.embed_tokens.weight"),
        ("model.language_model.norm.weight", "text.norm.weight"),
        ("language_model.lm_head.weight", "head.weight"),
        ("lm_head.weight", "head.weight"),
        ("vision_tower.vision_model.pre_layrnorm.bias", "vision.pre_layrnorm.bias"),
        ("model.vision_tower.vision_model.pre_layrnorm.bias", "vision.pre_layrnorm.bias"),
        ("model.vision_tower.pre_layrnorm.bias", "vision.pre_layrnorm.bias"),
        ("vision_tower.head.probe", "vision.head.probe"),
        ("multi_modal_projector.linear_1.weight", "projector.linear_1.weight"),
        ("model.multi_modal_projector.linear_2.bias", "projector.linear_2.bias"),
        ("image_newline", "image_newline"),
        ("my_language_model.norm.weight", "my_language_model.norm.weight"),
        ("lm_headless.weight", "lm_headless.weight"),
    ],
)
def test_every_known_spelling_has_one_canonical_name(source: str, canonical: str) -> None:
    assert canonical_name(source) == canonical


@pytest.fixture(scope="module")
def saved_by_transformers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same kind of model as transformers saves it by default, with its own new names, and in shards."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**size, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**size, vocab_size=32, num_key_value_heads=1),
        image_token_index=31,
    )
    model = transformers.LlavaForConditionalGeneration(config).half()
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder / "default")
    model.save_pretrained(folder / "sharded", max_shard_size="4KB")
    # What a release that does not map names back would have written: the modules' own names.
    shutil.copytree(folder / "default", folder / "modules")
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    safetensors.numpy.save_file(state, folder / "modules" / SINGLE)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["default", "sharded", "modules"])
def test_what_transformers_saves_opens_with_canonical_names(saved_by_transformers: dict[str, Path], kind: str) -> None:
    folder = saved_by_transformers[kind]
    assert (folder / INDEX).exists() == (kind == "sharded")
    found = open_checkpoint(str(folder))
    for name, shape in {
        "text.embed_tokens.weight": (32, 8),
        "text.layers.0.self_attn.q_proj.weight": (8, 8),
        "text.layers.0.self_attn.k_proj.weight": (4, 8),
        "text.norm.weight": (8,),
        "head.weight": (32, 8),
        "projector.linear_1.weight": (8, 8),
        "vision.embeddings.patch_embedding.weight": (8, 3, 4, 4),
        "vision.encoder.layers.0.self_attn.out_proj.bias": (8,),
        "vision.post_layernorm.weight": (8,),
    }.items():
        assert found.require(name, shape).dtype == "F16"
    assert {name.partition(".")[0] for name in found.tensors} == {"text", "head", "projector", "vision"}


# Opening


def test_one_file_and_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    one, many = open_checkpoint(str(make(tmp_path / "one"))), open_checkpoint(str(make_sharded(tmp_path / "many")))
    assert one.tensors.keys() == many.tensors.keys()
    assert one.config == many.config == CONFIG
    assert one.revision is None
    np.testing.assert_array_equal(read_bits(many.tensors["projector.linear_1.weight"]), np.ones((4, 2)))
    assert many.tensors["vision.embeddings.position_ids"].dtype == "I64"


def test_the_fingerprint_follows_config_and_headers_not_the_place(tmp_path: Path) -> None:
    first = open_checkpoint(str(make(tmp_path / "a"))).fingerprint()
    assert open_checkpoint(str(make(tmp_path / "b"))).fingerprint() == first
    assert open_checkpoint(str(make(tmp_path / "c", CONFIG | {"pad_token_id": 0}))).fingerprint() != first
    wider = WEIGHTS | {Q_PROJ: np.ones((4, 4), np.float32)}
    assert open_checkpoint(str(make(tmp_path / "d", weights=wider))).fingerprint() != first
    assert len(first) == 64


def test_custom_code_beside_the_weights_is_ignored(tmp_path: Path) -> None:
    folder = make(tmp_path, CONFIG | {"auto_map": {"AutoModel": "modeling.Evil"}})
    (folder / "modeling.py").write_text("raise SystemExit('executed')")
    assert open_checkpoint(str(folder)).tensors


def test_a_config_without_architectures_is_judged_by_its_model_type(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "architectures"}
    assert open_checkpoint(str(make(tmp_path, config))).tensors


# The config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json is not sound JSON"),
        ("[1]", "config.json is a JSON list, not an object"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested deeper than the limit of 64"),
        ("{" + " " * 2**20 + "}", "holds 1,048,578 bytes, the limit for such a file is 1,048,576"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(make(tmp_path, config)))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    (make(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "lfm2-vl", "architectures": ["Lfm2VlForConditionalGeneration"]},
            r"^model_type 'lfm2-vl' \(Lfm2Vl\w+\) is not supported: this is LFM2-VL's first form",
        ),
        ({"architectures": ["LlavaMptForCausalLM"]}, "original LLaVA layout with an unsupported decoder"),
        ({"architectures": ["LlavaLlamaForCausalLM"]}, "mixes the original LLaVA layout with Hugging Face's"),
        ({"model_type": "llava_llama", "architectures": None}, "mixes the original LLaVA layout"),
        ({"model_type": "llava_next"}, r"'llava_next' \(LlavaForConditionalGeneration\); .*Generation$"),
        ({"model_type": None, "architectures": 3}, r"model_type 'None' \(no architecture\)"),
        ({"model_type": ["\n"], "architectures": ["\n", {}]}, "model_type"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quantised \(hqq\); vtx reads awq, .*; use the unquantised",
        ),
        ({"text_config": {"quantization_config": [1]}}, r"quantised \(quantization_config\)"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        open_checkpoint(str(make(tmp_path, CONFIG | changes)))
    assert str(caught.value).isprintable()


def test_a_json_object_reader_raises_the_error_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "a.json", 8) == {"a": 1}
    with pytest.raises(BundleError):
        read_json_object(tmp_path / "a.json", 7, error=BundleError)


# The weights


def test_a_missing_shard_is_named_with_what_it_holds(tmp_path: Path) -> None:
    (make_sharded(tmp_path) / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} is missing, {INDEX} puts 2 tensors there"):
        open_checkpoint(str(tmp_path))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    shard = make_sharded(tmp_path) / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} holds .* bytes, its header says .*; download it again"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("no JSON", "not sound JSON"),
        ([], "not an object"),
        ({}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is duplicated"),
        (" " * (2**23 + 1), "the limit for such a file is 8,388,608"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: object, message: str) -> None:
    put_index(make_sharded(tmp_path), index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "shard",
    [
        3,
        None,
        "",
        "../model.safetensors",
        "a/../../model.safetensors",
        "./model.safetensors",
        "/etc/model.safetensors",
        "a\\model.safetensors",
        "C:model.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, shard: object) -> None:
    with pytest.raises(CheckpointError, match=r"'w' into .*, which is not a file name inside it"):
        open_checkpoint(str(make_sharded(tmp_path, {"w": shard})))


def test_an_index_cannot_name_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"names 'pytorch_model\.bin'"):
        open_checkpoint(str(make_sharded(tmp_path, {"w": "pytorch_model.bin"})))


def test_a_tensor_the_index_promises_in_vain_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"tensor 'w' is not in {SHARDS[0]}, where {INDEX} puts it"):
        open_checkpoint(str(make_sharded(tmp_path, {"w": SHARDS[0]})))


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"tensor '{Q_PROJ}' is not in {SHARDS[1]}"):
        open_checkpoint(str(make_sharded(tmp_path, {Q_PROJ: SHARDS[1]})))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    safetensors.numpy.save_file(WEIGHTS, tmp_path / SHARDS[1])
    with pytest.raises(CheckpointError, match=f"is both in {SHARDS[0]} and in {SHARDS[1]}"):
        open_checkpoint(str(tmp_path))


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    weights = WEIGHTS | {"lm_head.weight": np.ones((8, 4), np.float16)}
    with pytest.raises(CheckpointError, match=r"two names of one weight, 'head\.weight'"):
        open_checkpoint(str(make(tmp_path, weights=weights)))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "llava.pt", "w.pth", "w.ckpt"])
def test_a_pickle_is_refused_unopened_and_says_what_to_do(tmp_path: Path, name: str) -> None:
    (make(tmp_path) / SINGLE).unlink()
    (tmp_path / name).mkdir()  # opening it would fail in another way
    with pytest.raises(CheckpointError, match=r"pickle .*is not opened.*--allow-pickle"):
        open_checkpoint(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (make(tmp_path) / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"holds neither {SINGLE} nor {INDEX}"):
        open_checkpoint(str(tmp_path))


# Links


def test_a_linked_directory_does_not_lead_a_shard_out(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "model")
    shutil.move(folder / SHARDS[0], tmp_path / SHARDS[0])
    (folder / "sub").symlink_to("..")
    put_index(folder, {"weight_map": {Q_PROJ: f"sub/{SHARDS[0]}"}})
    with pytest.raises(CheckpointError, match="leaves the checkpoint"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("target", ["nowhere", SINGLE])
def test_a_dangling_link_or_a_circle_is_refused(tmp_path: Path, target: str) -> None:
    (make(tmp_path) / SINGLE).unlink()
    (tmp_path / SINGLE).symlink_to(target)
    with pytest.raises(CheckpointError, match="dangling link"):
        open_checkpoint(str(tmp_path))


def test_links_inside_the_folder_and_links_to_the_folder_are_fine(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (folder / SINGLE).rename(folder / "weights.safetensors")
    (folder / SINGLE).symlink_to("weights.safetensors")
    (tmp_path / "link").symlink_to("model")
    assert open_checkpoint(str(tmp_path / "link")).tensors


@pytest.mark.parametrize("shared", [False, True])
def test_the_hub_cache_s_own_links_are_fine_and_tell_the_commit(tmp_path: Path, shared: bool) -> None:
    snapshot = make_cache(tmp_path, shared)
    checkpoint = open_checkpoint(str(snapshot))
    assert checkpoint.revision == COMMIT
    assert checkpoint.tensors["head.weight"].file == snapshot / SHARDS[0]
    assert checkpoint.fingerprint() == open_checkpoint(str(make_sharded(tmp_path / "plain"))).fingerprint()


def test_a_model_of_the_cache_may_be_moved_and_renamed(tmp_path: Path) -> None:
    repo = make_cache(tmp_path / "cache").parent.parent.rename(tmp_path / "smolvlm")
    checkpoint = open_checkpoint(str(repo / "snapshots" / COMMIT))
    assert (checkpoint.revision, len(checkpoint.tensors)) == (COMMIT, len(WEIGHTS))


def test_a_folder_of_links_into_the_cache_is_refused_with_the_command_that_makes_files_of_them(tmp_path: Path) -> None:
    snapshot, links = make_cache(tmp_path), tmp_path / "links"
    links.mkdir()
    for file in snapshot.iterdir():
        (links / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match=f"in place of links: cp -rL {links} COPY"):
        open_checkpoint(str(links))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "size", "limit"), [("config.json", 1 << 20, "1,048,576"), ("tokenizer_config.json", 64 << 20, "8,388,608")]
)
def test_a_settings_file_may_be_as_large_as_published_ones_and_not_huge(
    tmp_path: Path, name: str, size: int, limit: str
) -> None:
    write_json(tmp_path / name, {"padding": " " * size})
    with pytest.raises(CheckpointError, match=f"{name} holds .* bytes, the limit for such a file is {limit}"):
        read_settings(tmp_path, name)
    write_json(tmp_path / "tokenizer_config.json", {"padding": " " * 1_157_007})  # as large as Gemma 3's
    assert read_settings(tmp_path, "tokenizer_config.json")


def test_a_snapshot_cannot_link_into_another_model(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path)
    other = tmp_path / "models--org--other" / "blobs" / "0"
    other.parent.mkdir(parents=True)
    shutil.copy(snapshot / SHARDS[0], other)
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(other)
    with pytest.raises(CheckpointError, match="leaves the checkpoint"):
        open_checkpoint(str(snapshot))


# require and check_finite


def test_a_required_tensor_must_be_there_in_the_promised_shape(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make(tmp_path)))
    assert checkpoint.require("text.layers.0.self_attn.q_proj.weight", (4, 4)).name == Q_PROJ
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is missing; .* needs 2 layers"):
        checkpoint.require("text.layers.1.mlp.up_proj.weight", (4, 4))
    with pytest.raises(CheckpointError, match=r"tensor text\.norm\.weight is missing; .* with shape \[4\]"):
        checkpoint.require("text.norm.weight", (4,))
    with pytest.raises(CheckpointError, match=r"has shape \[8, 4\], config.json needs \[9, 4\]"):
        checkpoint.require("head.weight", (9, 4))


@pytest.mark.parametrize("part", [None, 3, {}, {"num_hidden_layers": [1]}])
def test_a_missing_tensor_is_named_whatever_the_config_holds(tmp_path: Path, part: object) -> None:
    checkpoint = open_checkpoint(str(make(tmp_path, CONFIG | {"text_config": part})))
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.require("text.layers.1.mlp.up_proj.weight", (4, 4))


def test_a_checkpoint_without_its_vision_tower_is_told_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make(tmp_path, weights={Q_PROJ: WEIGHTS[Q_PROJ]})))
    with pytest.raises(CheckpointError, match="holds no weights of the vision tower; use the whole model"):
        checkpoint.require("vision.embeddings.class_embedding", (4,))


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    eights = make(tmp_path / "int8", weights=WEIGHTS | {Q_PROJ: np.ones((4, 4), np.int8)})
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight is stored as I8.*use the unquantised"):
        open_checkpoint(str(eights)).require("text.layers.0.self_attn.q_proj.weight", (4, 4))
    packed = {Q_PROJ.replace(".weight", ".qweight"): np.ones((1, 4), np.int32)}
    with pytest.raises(UnsupportedModelError, match=r"packed as .*qweight.*use the unquantised"):
        open_checkpoint(str(make(tmp_path / "gptq", weights=packed))).require(
            "text.layers.0.self_attn.q_proj.weight", (4, 4)
        )


def test_float64_weights_are_not_called_quantised(tmp_path: Path) -> None:
    doubles = make(tmp_path, weights=WEIGHTS | {Q_PROJ: np.ones((4, 4), np.float64)})
    with pytest.raises(UnsupportedModelError, match=r"stored as F64.*save the checkpoint as float32"):
        open_checkpoint(str(doubles)).require("text.layers.0.self_attn.q_proj.weight", (4, 4))


def test_an_unmerged_adapter_inside_the_weights_is_told_as_such(tmp_path: Path) -> None:
    weights = {Q_PROJ.replace(".weight", ".base_layer.weight"): WEIGHTS[Q_PROJ]}
    with pytest.raises(UnsupportedModelError, match=r"base_layer\.weight with an adapter; merge"):
        open_checkpoint(str(make(tmp_path, weights=weights))).require("text.layers.0.self_attn.q_proj.weight", (4, 4))


@pytest.mark.parametrize("kept", [(), ("config.json",), ("config.json", SINGLE)])
def test_an_adapter_is_named_with_the_model_it_belongs_to(tmp_path: Path, kept: tuple[str, ...]) -> None:
    """Beside a whole model too: transformers applies it to the model that it names."""
    for name in {"config.json", SINGLE} - set(kept):
        (make(tmp_path) / name).unlink()
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    with pytest.raises(UnsupportedModelError, match=r"holds an adapter of 'org/base' \(adapter_config.*merge it"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("wrapper", ["base_model.model.", "module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_a_wrapper_of_the_model_has_put_before_all_others_are_left_out(tmp_path: Path, wrapper: str) -> None:
    plain = open_checkpoint(str(make(tmp_path / "plain")))
    wrapped = open_checkpoint(str(make(tmp_path / "w", weights={wrapper + name: w for name, w in WEIGHTS.items()})))
    assert wrapped.tensors.keys() == plain.tensors.keys()


def test_names_of_a_compiled_part_are_read_and_of_a_part_that_is_wrapped_are_not(tmp_path: Path) -> None:
    compiled = {name.replace("language_model.", "language_model._orig_mod."): w for name, w in WEIGHTS.items()}
    assert open_checkpoint(str(make(tmp_path / "c", weights=compiled))).tensors.keys() >= {"head.weight"}
    mixed = open_checkpoint(str(make(tmp_path / "m", weights=WEIGHTS | {"module.x": WEIGHTS[Q_PROJ]})))
    assert "module.x" in mixed.tensors
    with pytest.raises(CheckpointError, match="are two names of one weight"):
        open_checkpoint(str(make(tmp_path / "t", weights=compiled | WEIGHTS)))


@pytest.mark.parametrize("kept", [(), ("config.json",)])
def test_a_folder_or_file_of_llama_cpp_is_told_as_such(tmp_path: Path, kept: tuple[str, ...]) -> None:
    folder = make(tmp_path / "model")
    for name in {"config.json", SINGLE} - set(kept):
        (folder / name).unlink()
    (folder / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    (folder / "mmproj.gguf").write_bytes(b"GGUF")
    for address in (folder, folder / "mmproj.gguf"):
        with pytest.raises(UnsupportedModelError, match=r"is in GGUF, .*use the Hugging Face checkpoint"):
            open_checkpoint(str(address))


LEROBOT = {"type": "act", "n_obs_steps": 1, "input_features": {}, "output_features": {}, "chunk_size": 50}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LEROBOT, "of LeRobot's policy 'act'; vtx exports pi0, pi05, smolvla"),
        (
            {**CONFIG, "model_type": "lfm2-vl", "architectures": ["Lfm2VlForConditionalGeneration"]},
            "of model_type lfm2_vl",
        ),
    ],
)
def test_what_another_library_saved_is_refused_with_what_to_do(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        open_checkpoint(str(make(tmp_path, config)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", SINGLE, PICKLE])
def test_a_pointer_of_git_lfs_says_what_to_fetch(tmp_path: Path, name: str) -> None:
    if name == PICKLE:
        (make(tmp_path) / SINGLE).unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 13476\n"
    (make(tmp_path) if name != PICKLE else tmp_path).joinpath(name).write_text(pointer)
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of git-lfs.*git lfs pull"):
        open_checkpoint(str(tmp_path), allow_pickle=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found_and_counted(dtype: str, value: float) -> None:
    weights = np.full((3, 200_001), np.finfo(dtype).max, dtype)
    check_finite(weights, "w")
    weights[0, 0] = weights[2, -1] = value
    with pytest.raises(CheckpointError, match="tensor w holds NaN or infinity in 2 of 600,003 values"):
        check_finite(weights, "w")


def test_bf16_is_checked_by_its_bits() -> None:
    finite = np.array([0x7F7F, 0xFF7F, 0, 0x8000, 1, 0x3F80], np.uint16)
    check_finite(finite, "w")
    check_finite(np.zeros((), np.uint16), "w")
    for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFF81):
        with pytest.raises(CheckpointError, match="in 1 of 7 values"):
            check_finite(np.append(finite, np.uint16(bits)), "w")


def test_a_mapped_tensor_at_an_odd_offset_is_checked(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    raw = json.dumps(header).encode()
    data = b"\0" + np.array([1, np.nan], np.float32).tobytes()
    (tmp_path / "m").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    with pytest.raises(CheckpointError, match="in 1 of 2 values"):
        check_finite(read_bits(read_header(tmp_path / "m").tensors["w"]), "w")


# The hub


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = make(tmp_path)
    with pytest.raises(CheckpointError, match="is a file; name the directory"):
        open_checkpoint(str(folder / SINGLE))


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    """A sparse file of 4 GiB opens at once, and its pages stay unread."""
    header = {"lm_head.weight": {"dtype": "F16", "shape": [2**31], "data_offsets": [0, 2**32]}}
    raw = json.dumps(header).encode()
    path = make(tmp_path) / SINGLE
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + 2**32)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.require("head.weight", (2**31,)).nbytes == 2**32
    assert checkpoint.fingerprint()
