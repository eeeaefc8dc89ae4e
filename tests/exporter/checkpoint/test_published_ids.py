"""Added tokens keep the ids that a checkpoint's small files give them, and other ids are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.families.original import write_tokenizer_model
from tests.support.json_files import read_json, write_json
from tests.support.text import VICUNA, make_tokenizer, read, write_checkpoint
from vtx.exporter.checkpoint.published_ids import token_settings
from vtx.exporter.checkpoint.text import TextOptions, read_text
from vtx.runtime.errors import BundleError, CheckpointError

pytestmark = pytest.mark.usefixtures("in_process")

FIX = "use the files that belong to the model"
SPECIAL = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def write_internlm(folder: Path) -> tuple[int, int]:
    """A sentencepiece model with unused pieces where tokenizer_config.json puts others, and the number of pieces."""
    from transformers.convert_slow_tokenizer import import_protobuf

    path = folder / "tokenizer.model"
    write_tokenizer_model(path, 400)
    model = import_protobuf().ModelProto()  # type: ignore[no-untyped-call]
    model.ParseFromString(path.read_bytes())
    first = len(model.pieces)
    for number in range(4):
        model.pieces.add(piece=f"[UNUSED_TOKEN_{number}]", score=0.0, type=4)
    model.normalizer_spec.add_dummy_prefix = False
    path.write_bytes(model.SerializeToString())
    return first, len(model.pieces)


def test_tokens_in_place_of_unused_pieces_have_their_published_ids(tmp_path: Path) -> None:
    """InternVL2 puts <|im_start|> where InternLM2's tokenizer.model has [UNUSED_TOKEN_146]; it got the next free id."""
    first, count = write_internlm(tmp_path)
    ids = {"<|im_end|>": first + 1, "<|im_start|>": first + 2, "<img>": count, "</img>": count + 1}
    ids |= {"<IMG_CONTEXT>": count + 2}
    added = {str(id): {"content": token, **SPECIAL} for token, id in ids.items()}
    config = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": added}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    write_json(tmp_path / "tokenizer_config.json", config)
    json_text, _, settings = read_text(
        tmp_path,
        count + 2,
        {},
        {},
        TextOptions(VICUNA.replace("<image>", "<IMG_CONTEXT>"), original=True, vocab=count + 3),
    )
    tokenizer = Tokenizer.from_str(json_text)
    assert {token: tokenizer.token_to_id(token) for token in ids} == ids
    assert settings.control_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, **ids}
    im_start = tokenizer.encode("<|im_start|>the", add_special_tokens=False).ids
    assert im_start == [first + 2, *tokenizer.encode("the", add_special_tokens=False).ids]
    unused = tokenizer.encode("[UNUSED_TOKEN_0] [UNUSED_TOKEN_2]", add_special_tokens=False).ids
    assert unused.count(first) == 1  # one that nothing replaces
    assert first + 2 not in unused


def write_added(folder: Path, *, config: Any = None, added: Any = None) -> dict[str, Any]:
    """A checkpoint whose small files give ids; returns its config.json."""
    top = write_checkpoint(folder, **({} if config is None else {"added_tokens_decoder": config}))
    if added is not None:
        write_json(folder / "added_tokens.json", added)
    return top


def test_the_ids_of_the_files_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    ids = {token: id for id, token in make_tokenizer("first").get_added_tokens_decoder().items()}
    listed = {str(id): {"content": token.content, **SPECIAL} for token, id in ids.items()}
    top = write_added(tmp_path, config=listed, added={token.content: id for token, id in ids.items()})
    tokenizer = Tokenizer.from_str(read(tmp_path, top)[0])
    assert all(tokenizer.token_to_id(token.content) == id for token, id in ids.items())


@pytest.mark.parametrize(
    ("config", "added", "message"),
    [
        (
            {"9": {"content": "<|im_start|>", **SPECIAL}},
            None,
            r"gives '<\|im_start\|>' the id 9, and the tokenizer",
        ),
        (None, {"<|im_end|>": 5}, r"gives '<\|im_end\|>' the id 5, and the tokenizer \d+"),
        (
            {"-3": {"content": "<a>"}},
            None,
            r"the id of token '<a>' is '-3'; a token must have a text and a",
        ),
        (
            None,
            {"<a>": -3},
            "the id of token '<a>' is -3; a token must have .* from 0 to 16,777,215",
        ),
        (
            None,
            {"<a>": 1 << 40},
            "the id of token '<a>' is 1099511627776; a token must have",
        ),
        (None, {"<a>": "9"}, "gives '<a>' the id 9, and the tokenizer has no such token|the tokenizer"),
        (None, {"<a>": True}, "the id of token '<a>' is True; a token must have"),
        (None, {"<a>": [1]}, r"the id of token '<a>' is \[1\]; a token must have"),
        (None, {"<a>": 700, "<b>": 700}, "gives '<b>' the id 700, beside '<a>' with the id 700"),
        ({"700": {"content": "<a>"}}, {"<a>": 701}, "gives '<a>' the id 701, beside '<a>' with the id 700"),
        ({"700": {"text": "<a>"}}, None, "the id of token None is '700'; a token must have a text"),
        ({"700": 7}, None, "the id of token 7 is '700'; a token must have a text"),
        (["<a>"], None, "added_tokens_decoder is a list, not an object"),
    ],
)
def test_other_ids_are_refused_by_name(config: Any, added: Any, message: str, tmp_path: Path) -> None:
    top = write_added(tmp_path, config=config, added=added)
    with pytest.raises(CheckpointError, match=message) as error:
        read(tmp_path, top)
    assert "\n" not in str(error.value)


def test_the_configuration_comes_before_the_map_of_special_tokens(tmp_path: Path) -> None:
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<a>", "pad_token": "<p>"})
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<b>"})
    assert token_settings(tmp_path) == {"eos_token": "<b>", "pad_token": "<p>"}


def test_ids_beyond_the_models_table_are_refused_if_a_prompt_can_have_them(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path)
    image = top["image_token_index"]
    # the embedding of a placeholder is never read, and special tokens without a place in the template stay text
    spec = read_json(tmp_path / "tokenizer.json")
    spec["added_tokens"].append({"id": image + 1, "content": "<pad>", **SPECIAL})
    write_json(tmp_path / "tokenizer.json", spec)
    assert read(tmp_path, top, vocab=image)[2].image_token_id == image
    with pytest.raises(BundleError, match=rf"the tokenizer gives token {image + 1} \('<pad>'\), the model has"):
        read(tmp_path, top, vocab=image, template="<pad>" + VICUNA)
    spec["added_tokens"][-1]["special"] = False
    write_json(tmp_path / "tokenizer.json", spec)
    for vocab in (image, image + 1):
        message = rf"has the id {image + 1} \('<pad>'\), and the model has {vocab} tokens.*{FIX}"
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, top, vocab=vocab)
    assert read(tmp_path, top, vocab=image + 2)[2].image_token_id == image
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, image + 2]})
    with pytest.raises(CheckpointError, match=rf"the id {image + 2} \(None\), and the model has {image + 2} tok"):
        read(tmp_path, top, vocab=image + 2)


def test_another_image_token_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path, extra_special_tokens={"image_token": "<|im_start|>"})
    with pytest.raises(
        CheckpointError, match=r"the tokenizer's image_token is '<\|im_start\|>', and the config's, \d+, is"
    ):
        read(tmp_path, top)
