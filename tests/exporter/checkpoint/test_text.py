"""Tokenizer, template and end tokens of a checkpoint, as transformers would read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.json_files import read_json, write_json
from tests.support.text import CHATML, CHATS, KINDS, ROWS, TEXTS, read, write_checkpoint
from vtx.exporter.bundling.prepare import load_template
from vtx.exporter.checkpoint.text import TextOptions, read_template, read_text
from vtx.runtime.errors import CheckpointError, TemplateError
from vtx.runtime.prompt.text import Text


def test_a_byte_order_mark_is_no_part_of_a_template_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(CHATML, encoding="utf-8-sig")
    assert load_template(tmp_path / "template.jinja") == CHATML


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llava", "llama", "unheard-of"])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast", "MyOwnTokenizer", None])
def test_exported_ids_equal_autotokenizer_s(
    kind: str, model_type: str, tokenizer_class: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    if kind == "words" and (model_type, tokenizer_class) != ("llava", "PreTrainedTokenizerFast"):
        pytest.skip("a class made for BPE")
    config = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    top = write_checkpoint(tmp_path, kind, add_bos_token=True, **config) | {"model_type": model_type}
    write_json(tmp_path / "config.json", top)
    json_text, template, settings = read(tmp_path, top)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = Tokenizer.from_str(json_text)
    for sentence in ("USER: <image>\nwhat is this?</s> the", " Hello", "<s>猫"):
        assert ours.encode(sentence).ids == theirs.encode(sentence)
        own = ours.encode(sentence, add_special_tokens=False).ids
        assert [*settings.ids_before, *own, *settings.ids_after] == theirs.encode(sentence)
    assert (settings.bos_token, settings.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert Text(ours, template, settings).prompt(CHATS["image"], ROWS).size


def test_vocab_and_merges_are_converted(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path, "bytes", tokenizer_class="Qwen2Tokenizer")
    model = read_json(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    write_json(tmp_path / "vocab.json", model["model"]["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    added = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in model["added_tokens"]}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    write_json(tmp_path / "tokenizer_config.json", config)
    write_json(tmp_path / "config.json", top)
    json_text, _, settings = read_text(
        tmp_path, top["image_token_index"], {"model_type": "qwen2"}, top, TextOptions(CHATML)
    )
    assert settings.eos_token == "<|im_end|>"
    ids = Text(Tokenizer.from_str(json_text), CHATML, settings).prompt(CHATS["turns"], ROWS)
    assert ids.tolist() == TEXTS["bytes", "chatml"].prompt(CHATS["turns"], ROWS).tolist()


def test_nothing_of_the_checkpoint_is_executed(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["mine.Slow", "mine.Fast"], "AutoConfig": "mine.Config"}
    top = write_checkpoint(tmp_path, tokenizer_class="MyOwnTokenizer", auto_map=auto_map) | {"auto_map": auto_map}
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Slow: pass\nclass Fast: pass")
    write_json(tmp_path / "config.json", top)
    assert read(tmp_path, top)
    assert not (tmp_path / "ran").exists()


def test_templates_are_found_in_transformers_order(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path, template=None)
    with pytest.raises(CheckpointError, match=r"no chat template in .*--chat-template FILE"):
        read(tmp_path, top)
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "1"}]})
    assert read_template(tmp_path) == "1"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "2"})
    assert read_template(tmp_path) == "2"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("3")
    assert read_template(tmp_path) == "3"
    (tmp_path / "chat_template.jinja").write_text("4")
    assert read_template(tmp_path) == "4"
    write_json(tmp_path / "chat_template.json", {"chat_template": "5"})
    assert read_template(tmp_path) == "5"
    write_json(tmp_path / "processor_config.json", {"chat_template": "6"})
    assert read_template(tmp_path) == "6"
    write_json(tmp_path / "processor_config.json", {"chat_template": 6})
    with pytest.raises(CheckpointError, match="must be text"):
        read_template(tmp_path)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("generation", "text", "top", "expected"),
    [
        ({"eos_token_id": [7, 2, 7]}, {"eos_token_id": 3}, {}, (7, 2)),
        ({}, {"eos_token_id": 3}, {}, (3, 2)),
        ({}, {"eos_token_id": 3}, {"eos_token_id": 4}, (4, 2)),
        (None, {}, {}, (2,)),
    ],
)
def test_end_ids_are_those_of_generate_and_without_its_file_the_tokenizers_too(
    generation: Any, text: Any, top: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    top = write_checkpoint(tmp_path) | top  # the tokenizer's end token is 2
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert read_text(tmp_path, top["image_token_index"], text, top)[2].end_ids == expected


@pytest.mark.usefixtures("in_process")
def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no added token 5"):
        read_text(tmp_path, 5, {}, top)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": ["x"]})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        read(tmp_path, top)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not sound JSON"):
        read(tmp_path, top)
    (tmp_path / "generation_config.json").write_text(" " * (2 << 20))
    with pytest.raises(CheckpointError, match="the limit for such a file is 1,048,576"):
        read(tmp_path, top)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(TemplateError):
        read(tmp_path, top, template="{{ ''.__class__ }}")
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": 5, "added_tokens_decoder": {"x": 1}})
    with pytest.raises(CheckpointError):
        read(tmp_path, top)
    for content in ("{", '{"added_tokens": []}', "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError):
            read(tmp_path, top)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(CheckpointError, match="limit"):
        read(tmp_path, top)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        read(tmp_path, top)
