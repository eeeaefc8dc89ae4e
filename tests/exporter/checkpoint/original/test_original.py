"""Checkpoints in original LLaVA's layout: their towers, what they may say, and the prompts they were trained with."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.families.original import SCRIPTS, TOWER
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.original.templates import TEMPLATES
from vtx.exporter.checkpoint.original.tokenizer import check_kind, original_tokenizer
from vtx.runtime.bundle.safetensors import read_tensor
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError

PAD = Tiny(family="llava_llama", aspect="pad", context=1024)
CLASS = "vision.embeddings.class_embedding"


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint(PAD), tmp_path / "checkpoint"))


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    write_json(path, read_json(path) | values)
    return folder


def config(folder: Path) -> dict[str, Any]:
    tower = read_json(folder / TOWER / "config.json")
    found: dict[str, Any] = read_json(folder / "config.json")
    return found | {"vision_config": tower}


def class_token(checkpoint: Checkpoint) -> list[float]:
    values: list[float] = read_tensor(checkpoint.tensors[CLASS]).tolist()
    return values


def test_the_tower_is_found_inside_the_checkpoint_or_given(folder: Path, tmp_path: Path) -> None:
    inside = open_checkpoint(str(folder))
    assert inside.notes == (f"the vision tower is from {folder / TOWER}",)
    before = class_token(inside)
    elsewhere = Path(shutil.move(folder / TOWER, tmp_path / "elsewhere"))
    given = open_checkpoint(str(folder), tower=str(elsewhere))
    assert class_token(given) == before
    assert given.config == inside.config


@pytest.mark.parametrize("name", ["somewhere/clip-tower", "/mnt/towers/clip", "../clip", "clip"])
def test_a_tower_that_is_not_there_is_refused_with_the_way_to_give_it(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.move(folder / TOWER, tmp_path / "clip")  # where "../clip" leads: not a place that a checkpoint may name
    change(folder, mm_vision_tower=name)
    with pytest.raises(CheckpointError, match=rf"it names '{name}', .*give the tower's directory with --tower PATH"):
        open_checkpoint(str(folder))


def test_a_tower_in_the_checkpoint_counts_where_it_was_trained_on(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = load_file(folder / TOWER / "model.safetensors")
    mine = {f"model.vision_tower.vision_tower.{name}": tensor + 1 for name, tensor in other.items()}
    save_file(load_file(folder / "model.safetensors") | mine, folder / "model.safetensors")
    frozen = open_checkpoint(str(folder))
    trained = open_checkpoint(str(change(folder, unfreeze_mm_vision_tower=True)))
    assert [value + 1 for value in class_token(frozen)] == pytest.approx(class_token(trained))
    assert trained.notes == ("the vision tower is the checkpoint's own, which was trained with it",)


@pytest.mark.parametrize("given", [False, True])
def test_a_tower_in_the_checkpoint_needs_only_settings_from_elsewhere(
    folder: Path, tmp_path: Path, given: bool
) -> None:
    from safetensors.torch import load_file, save_file

    other = load_file(folder / TOWER / "model.safetensors")
    mine = {f"model.vision_tower.vision_tower.{name}": tensor + 1 for name, tensor in other.items()}
    save_file(load_file(folder / "model.safetensors") | mine, folder / "model.safetensors")
    change(folder, unfreeze_mm_vision_tower=True)
    before = open_checkpoint(str(folder))
    (folder / TOWER / "model.safetensors").unlink()
    if given:
        shutil.move(folder / TOWER, tmp_path / "settings")
    after = open_checkpoint(str(folder), tower=str(tmp_path / "settings") if given else None)
    assert after.config == before.config
    assert after.tensors == before.tensors
    assert plan_export(ExportOptions(str(folder), tower=str(tmp_path / "settings") if given else None)).weights.files
    change(folder, unfreeze_mm_vision_tower=False)
    with pytest.raises(CheckpointError, match=r"the vision tower: .* holds neither model.safetensors nor"):
        open_checkpoint(str(folder), tower=str(tmp_path / "settings") if given else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["tower", "model"])
def test_a_pickled_tower_is_read_where_the_user_allows_it(folder: Path, kind: str) -> None:
    import torch
    from safetensors.torch import load_file

    before = open_checkpoint(str(folder))
    value = class_token(before)
    weights = (folder / TOWER if kind == "tower" else folder) / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.* is not opened; .*--allow-pickle"):
        open_checkpoint(str(folder))
    after = open_checkpoint(str(folder), allow_pickle=True)
    assert class_token(after) == value
    assert set(after.tensors) == set(before.tensors)


def test_a_tower_for_a_checkpoint_that_holds_one_is_refused(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(RequestError, match="this one holds it, leave it out"):
        open_checkpoint(str(tiny_checkpoint(Tiny())), tower="anything")


def test_a_tower_of_another_kind_or_width_is_refused(folder: Path, tmp_path: Path) -> None:
    settings = config(folder)
    write_json(folder / TOWER / "config.json", settings["vision_config"] | {"model_type": "dinov2"})
    with pytest.raises(UnsupportedModelError, match="the vision tower is model_type 'dinov2'"):
        open_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match="hidden size 32, and mm_hidden_size is 64"):
        read_config(settings | {"mm_hidden_size": 64})


def test_layouts_do_not_mix(folder: Path) -> None:
    named = {"architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next"}
    with pytest.raises(UnsupportedModelError, match=r"Hugging Face's layout and holds LLaVA's own settings \(mm_"):
        read_config({**config(folder), **named})
    with pytest.raises(UnsupportedModelError, match="mixes the original LLaVA layout with Hugging Face's"):
        open_checkpoint(str(change(folder, vision_config={})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_aspect_ratio": "anyres_max_9"}, "image_aspect_ratio 'anyres_max_9' is not supported"),
        ({"image_aspect_ratio": "anyres"}, "mm_patch_merge_type 'flat' is not supported"),
        ({"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"}, "image_grid_pinpoints is 'None'"),
        (
            {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad", "image_grid_pinpoints": "(1x1)"},
            r"image_grid_pinpoints is '.*', not pairs of numbers",
        ),
        ({"mm_projector_type": "mlp2x_res2x_gelu"}, "mm_projector_type 'mlp2x_res2x_gelu' is not supported"),
        ({"mm_vision_select_feature": "cls"}, "mm_vision_select_feature 'cls' is not supported"),
        (
            {"mm_video_tower": "video", "mm_vision_tower": None},
            "this is Video-LLaVA in its authors' layout",
        ),
        ({"mm_vision_tower": None}, "mm_vision_tower is None, not .*; set it to the model's tower, e.g. openai/"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_built_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    settings = config(folder) | changes
    if "mm_v" in str([*changes]) and "select" not in str([*changes]):
        settings.pop("vision_config")
    with pytest.raises(CheckpointError, match=message):
        read_config(settings)


def test_projectors_have_as_many_matrices_as_they_say(folder: Path) -> None:
    settings = config(folder)
    kinds = "linear", "mlp2x_gelu", "mlp3x_gelu"
    assert [read_config(settings | {"mm_projector_type": kind}).projector_layers for kind in kinds] == [1, 2, 3]
    del settings["mm_projector_type"]
    assert read_config(settings).projector_layers == 1


def test_resolutions_may_be_spelled_as_a_string_and_are_width_and_height(folder: Path) -> None:
    settings = config(folder) | {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"}
    layouts = [read_config(settings | {"image_grid_pinpoints": points}).layout
               for points in ([[56, 112], [168, 56]], "[(56, 112), (168, 56)]")]  # fmt: skip
    assert layouts[0] == layouts[1]
    assert layouts[0].resolutions == ((56, 112), (168, 56))  # type: ignore[attr-defined]
    assert not layouts[0].rounded  # type: ignore[attr-defined]


def test_the_context_ends_where_the_original_cuts_prompts_off(folder: Path) -> None:
    assert read_config(config(folder) | {"tokenizer_model_max_length": 300}).text.max_positions == 300


PEOPLE = (
    "A chat between a curious {0} and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
    "polite answers to the {0}'s questions."
)
LLAMA_2 = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("vicuna_v1", PEOPLE.format("user") + " USER: <image>\nfirst ASSISTANT: answer</s>USER: second ASSISTANT:"),
        ("llava_v1", PEOPLE.format("human") + " USER: <image>\nfirst ASSISTANT: answer</s>USER: second ASSISTANT:"),
        (
            "llava_llama_2",
            f"[INST] <<SYS>>\n{LLAMA_2}\n<</SYS>>\n\n<image>\nfirst [/INST] answer </s><s>[INST] second [/INST]",
        ),
        ("mistral_instruct", "[INST] <image>\nfirst [/INST] answer </s>[INST] second [/INST]"),
    ],
)
def test_prompts_are_those_of_the_original(name: str, wanted: str) -> None:
    image = {"type": "image"}
    first, answer, second = ({"type": "text", "text": text} for text in ("first", "answer", "second"))
    messages = [
        {"role": "user", "content": [image, first]}, {"role": "assistant", "content": [answer]},
        {"role": "user", "content": [second]},
    ]  # fmt: skip
    values = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
    template = ImmutableSandboxedEnvironment().from_string(TEMPLATES[name])
    assert template.render(messages=messages, add_generation_prompt=True, **values) == wanted


def many_scripts(seed: int, words: int) -> str:
    """Words of many scripts, with single and several spaces, line breaks and digits between them."""
    chance = random.Random(seed)
    parts = []
    for _ in range(words):
        low, high = chance.choice(SCRIPTS)
        letters = [chr(chance.randrange(low, min(high, low + chance.choice((20, 1000))))) for _ in range(8)]
        between = chance.choice((" ", " ", "  ", "\n", ", ", "\t", " 17 ", ""))
        parts += ["".join(letters[: chance.randrange(1, 9)]), between]
    return "".join(parts)


@pytest.mark.slow
def test_a_converted_tokenizer_gives_sentencepieces_ids_in_many_scripts(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")
    corpus = tmp_path / "corpus"
    corpus.write_text(many_scripts(0, 20_000), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=6000, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
        character_coverage=0.99, split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    judge = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = original_tokenizer(tmp_path, "a test")
    text = many_scripts(1, 40_000)
    pieces = [text[at : at + 997] for at in range(0, len(text), 997)]
    assert len(text) > 200_000
    for piece in pieces:
        assert tokenizer.encode(piece, add_special_tokens=False) == judge.encode(piece)
    cut = tokenizer.encode("<image>".join(pieces[:9]))
    wanted = [1]
    for number, piece in enumerate(pieces[:9]):
        wanted += [0] * (number > 0) + judge.encode(piece)
    assert cut == wanted


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("trainer_spec", "model_type", 1),
        ("trainer_spec", "byte_fallback", False),
        ("normalizer_spec", "precompiled_charsmap", b"map"),
        ("normalizer_spec", "remove_extra_whitespaces", True),
    ],
)
def test_a_tokenizer_model_of_another_kind_is_refused(part: str, name: str, value: Any) -> None:
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()  # type: ignore[no-untyped-call]
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.pieces.add(piece="<unk>", type=2)
    check_kind(proto)
    setattr(getattr(proto, part), name, value)
    with pytest.raises(UnsupportedModelError, match="use the -hf checkpoint"):
        check_kind(proto)


def test_a_damaged_tokenizer_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05nothing of the kind" * 9)
    with pytest.raises(CheckpointError, match="cannot be read; download it again"):
        original_tokenizer(tmp_path, "a test")
