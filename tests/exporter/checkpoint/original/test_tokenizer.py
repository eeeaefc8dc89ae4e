"""tokenizer.model as tokenizer.json: the ids of sentencepiece, for runs of spaces, many scripts, bytes and symbols."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.families.original import PIECES, SCRIPTS, WORDS
from tests.support.json_files import write_json
from tests.support.published.places import published
from vtx.exporter.checkpoint.original.tokenizer import original_tokenizer, sentencepiece_tokenizer
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

RUN = -1e9  # the score of every run of spaces in Llama's model
SYMBOLS = ("<0x41>", "▁", "▁▁", "\u200b", "\u00a0", "\u3000", "\r\n", "\0", "e\u0301", "👩\u200d🚀", "…", "——", "\t")
FILES = published() / "tokenizers"


def proto_of(pieces: Sequence[tuple[str, float, int]], *, prefix: bool = True) -> Any:
    """A model of Llama's kind; a piece is its text, score and kind."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()  # type: ignore[no-untyped-call]
    for piece, score, kind in (("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *pieces):
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.trainer_spec.vocab_size = len(model.pieces)
    model.normalizer_spec.name, model.normalizer_spec.add_dummy_prefix = "identity", prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return model


def llama_like() -> list[tuple[str, float, int]]:
    """Bytes, runs of spaces of one lowest score in no order, words, and letters."""
    merged = dict.fromkeys(word[:end] for word in WORDS for end in range(2, len(word) + 1))
    runs = ["▁" * length for length in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15)]
    pieces = [(piece, 0.0, 6) for piece in PIECES if piece.startswith("<0x")]
    pieces += [(run, RUN, 1) for run in runs]
    pieces += [(piece, float(-n), 1) for n, piece in enumerate(merged)]
    return pieces + [(letter, RUN, 1) for letter in PIECES if len(letter) == 1]


def strings(pieces: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """Texts of runs of spaces and other characters, pieces, scripts, words and symbols."""
    chance = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(chance.randrange(1, 14)):
            low, high = chance.choice([*SCRIPTS, (1, 0x2100), (0xFF00, 0xFFEF)])
            parts += [
                chance.choice(
                    (
                        " " * chance.choice((1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 97)),
                        chance.choice("=-_#*.\n~aA0一") * chance.randrange(1, 70),
                        chance.choice(pieces) * chance.choice((1, 1, 2, 5)),
                        "".join(chr(chance.randrange(low, high)) for _ in range(chance.randrange(1, 9))),
                        chance.choice(SYMBOLS),
                        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=chance.randrange(1, 30))),
                    )
                )
            ]
        yield "".join(parts)


def check_same(folder: Path, tokenizer: Any, texts: Iterator[str], *, first: bool = False) -> None:
    judge = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in texts:
        # the mark of a space is put before a text that begins with one only where each piece gets it
        sample = text.lstrip(" ▁") if first else text
        assert tokenizer.encode(sample, add_special_tokens=False) == judge.encode(sample), sample


def test_runs_of_spaces_that_share_a_score_merge_from_the_left(tmp_path: Path) -> None:
    """Of Llama's runs 17 spaces are 16 and 1; transformers gave other pieces, and its releases different ones."""
    model = proto_of(llama_like())
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    tokenizer = original_tokenizer(tmp_path, "a test")
    ids = {piece.piece: id for id, piece in enumerate(model.pieces)}
    blank = "▁" * 16
    assert tokenizer.encode("a" + " " * 37, add_special_tokens=False) == [
        *(ids[piece] for piece in ("▁", "a", blank, blank, "▁▁▁▁▁"))
    ]
    check_same(tmp_path, tokenizer, strings([piece for piece in ids if "<" not in piece], 1000))


def test_symbols_that_sentencepiece_never_divides_stay_whole(tmp_path: Path) -> None:
    symbols = [("——", 0.0, 4), ("▁——▁", 0.0, 4), ("[UNUSED_TOKEN_0]", 0.0, 4), ("\uff25", 0.0, 4), ("\0", -5.0, 1)]
    model = proto_of([*llama_like(), *symbols], prefix=False)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    tokenizer = original_tokenizer(tmp_path, "a test", own_image_token=True)
    pieces = ["——", " —— ", "[UNUSED_TOKEN_0]", "\uff25", "▁the", "[UNUSED"]
    check_same(tmp_path, tokenizer, strings(pieces, 1000))
    assert tokenizer.encode("\0", add_special_tokens=False) == [3]  # its byte, as sentencepiece does
    model.normalizer_spec.add_dummy_prefix = True  # only once, which a tokenizer.json with added tokens cannot say
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"gives .* for 'a .*b', and as tokenizer.json"):
        original_tokenizer(tmp_path, "a test")


@pytest.mark.parametrize(
    ("settings", "after_image"),
    [({}, ["▁", "A"]), ({"legacy": True}, ["▁", "A"]), ({"legacy": False}, ["A"])],
)
def test_hugging_faces_layout_puts_the_mark_of_a_space_as_legacy_says(
    settings: dict[str, Any], after_image: list[str], tmp_path: Path
) -> None:
    model = proto_of(llama_like())
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    image = len(model.pieces)
    added = {str(image): {"content": "<image>", "normalized": False, "special": True}}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    write_json(tmp_path / "tokenizer_config.json", {**settings, **names, "added_tokens_decoder": added})
    tokenizer = sentencepiece_tokenizer(tmp_path, "a test")
    ids = tokenizer.encode("the<image>A")
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<s>", "▁the", "<image>", *after_image]
    assert (ids[2], tokenizer.pad_token_id, tokenizer.unk_token_id) == (image, image + 1, 0)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "theA" if len(after_image) == 1 else "the A"
    check_same(tmp_path, tokenizer, strings(["▁the", "is"], 300), first=settings.get("legacy") is False)
    write_json(tmp_path / "tokenizer_config.json", {**names, "add_bos_token": False, "add_eos_token": True})
    assert sentencepiece_tokenizer(tmp_path, "a test").encode("the")[1:] == [2]


def test_a_published_id_that_an_ordinary_piece_has_is_refused(tmp_path: Path) -> None:
    model = proto_of(llama_like())
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    id = next(id for id, piece in enumerate(model.pieces) if piece.piece == "▁the")
    write_json(tmp_path / "added_tokens.json", {"<x>": id})
    with pytest.raises(CheckpointError, match=f"token '<x>' has the id {id}, which tokenizer.model gives to '▁the'"):
        original_tokenizer(tmp_path, "a test")


def test_a_model_with_unused_pieces_is_refused(tmp_path: Path) -> None:
    model = proto_of([*llama_like(), ("xyz", -9.0, 5)])
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="use the -hf checkpoint"):
        original_tokenizer(tmp_path, "a test")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "internlm2"])
def test_published_models_give_sentencepieces_ids(name: str, tmp_path: Path) -> None:
    if not (FILES / name).is_dir():
        pytest.skip(f"no tokenizers/{name} in {published()}")
    path = FILES / name / "tokenizer.model"
    (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = original_tokenizer(tmp_path, name, own_image_token=True)
    judge = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [judge.id_to_piece(id) for id in range(259, judge.vocab_size())]
    check_same(tmp_path, tokenizer, strings(pieces, 10_000))
    # special tokens cut a text, and each piece begins as a text does
    left, right = strings(pieces, 2, seed=1)
    assert tokenizer.encode(f"{left}</s>{right}") == [1, *judge.encode(left), 2, *judge.encode(right)]


def test_llamas_published_model_gives_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    path = FILES / "llama" / "tokenizer.model"
    if not path.exists():
        pytest.skip(f"no tokenizers/llama in {published()}")
    (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = original_tokenizer(tmp_path, "llama", own_image_token=True)
    other = Tokenizer.from_file(str(path.with_name("openvla-tokenizer.json")))
    ours = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    theirs = json.loads(other.to_str())["model"]
    assert ours["vocab"] == {piece: id for piece, id in theirs["vocab"].items() if id < 32000}
    assert {tuple(pair) for pair in ours["merges"]} == {tuple(pair) for pair in theirs["merges"]}
    for text in strings([piece for piece in ours["vocab"] if "<" not in piece], 500):
        assert tokenizer.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False).ids
