"""A sentencepiece tokenizer.model as a tokenizer.json with the same ids. Runs in the confined process.

Original LLaVA splits a prompt at its images and tokenizes each piece separately, so every piece begins with the mark
of a space. The tokenizer made for it does the same: its normalizer prepends that mark to each piece between added
tokens, as transformers' legacy Llama tokenizer did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vtx.exporter.checkpoint.published_ids import UNK_ID, named_tokens, published_tokens, token_settings
from vtx.runtime.errors import CheckpointError, DeviceError, UnsupportedModelError
from vtx.runtime.prompt.tokenizer import rust_errors

FILE = "tokenizer.model"
IMAGE_TOKEN = "<image>"
BPE = 2  # a kind of model in sentencepiece's format
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # kinds of its pieces
_SPACE = "\u2581"
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_SAMPLES = (
    "What is this?", " two  spaces ", "\n", "a\tb\r\n", "½ﬁ Å e\u0301", "猫 ねこ кот قط बिल्ली", "👩\u200d🚀",
    "123,456.7", "a   b    c       d" + 17 * " " + "e" + 40 * " ", "=" * 37 + "-" * 19, "<0x41>\0",
)  # fmt: skip


def original_tokenizer(folder: Path, name: str, *, own_image_token: bool = False) -> Any:
    """The tokenizer.model in `folder` as original LLaVA uses it, with the image token instead of <unk>.

    Text without a piece becomes bytes and never <unk>, whose id is free. With an `own_image_token` among its added
    tokens it keeps <unk>. Raises CheckpointError, UnsupportedModelError, DeviceError.
    """
    if not (folder / FILE).exists():
        raise UnsupportedModelError(
            f"{name} has no {FILE}, which the original LLaVA layout needs; use the -hf checkpoint"
        )
    return _converted(folder, name, "each", "" if own_image_token else IMAGE_TOKEN)


def sentencepiece_tokenizer(folder: Path, name: str) -> Any:
    """The tokenizer.model in `folder` of Hugging Face's layout, which has no tokenizer.json.

    The mark of a space begins each text between added tokens, or with `legacy` false the whole text only. Raises
    CheckpointError, UnsupportedModelError, DeviceError.
    """
    settings = token_settings(folder)
    prefix = "first" if settings.get("legacy") is False else "each"
    return _converted(folder, name, "never" if settings.get("add_prefix_space") is False else prefix, "")


def _converted(folder: Path, name: str, prefix: str, image_token: str) -> Any:
    """A transformers tokenizer, after a comparison with sentencepiece; `image_token` replaces <unk> if not empty."""
    try:
        import sentencepiece
    except ImportError as cause:
        raise DeviceError(f'reading a {FILE} needs sentencepiece; pip install "vtx-edge[export]"') from cause
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import import_protobuf

    with rust_errors(CheckpointError, f"the {FILE} of {name} cannot be read; download it again"):
        judge = sentencepiece.SentencePieceProcessor(model_file=str(folder / FILE))
        proto = import_protobuf().ModelProto()
        proto.ParseFromString((folder / FILE).read_bytes())
    check_kind(proto)
    settings = token_settings(folder)
    prefix = prefix if proto.normalizer_spec.add_dummy_prefix else "never"
    spec = _spec(proto, prefix)
    if image_token:
        _replace_unknown(spec, image_token)
    _add(spec, proto, folder, image_token)
    vocab, trainer = spec["model"]["vocab"], proto.trainer_spec
    names = {"bos_token": trainer.bos_piece, "eos_token": trainer.eos_piece} | named_tokens(settings)
    names = {name: token for name, token in names.items() if settings.get(name, token) is not None}
    bos, eos = names.get("bos_token"), names.get("eos_token")
    before = [bos] if bos in vocab and settings.get("add_bos_token") is not False else []
    after = [eos] if eos in vocab and settings.get("add_eos_token") is True else []
    spec["post_processor"] = _around(vocab, before, after)
    with rust_errors(CheckpointError, f"the {FILE} of {name} cannot be converted; download it again"):
        backend = Tokenizer.from_str(json.dumps(spec))
        make: Any = PreTrainedTokenizerFast
        kinds = ("bos_token", "eos_token") if image_token else ("bos_token", "eos_token", "unk_token", "pad_token")
        tokenizer = make(tokenizer_object=backend, **{kind: names[kind] for kind in kinds if names.get(kind) in vocab})
    _compare(judge, tokenizer, [*_SAMPLES, *_user_defined(proto, vocab)], prefix, name)
    return tokenizer


def check_kind(proto: Any) -> None:
    """Raise UnsupportedModelError if a tokenizer.model would not give the same ids as tokenizer.json."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    kinds = {piece.type for piece in proto.pieces}
    if trainer.model_type != BPE or not trainer.byte_fallback or UNUSED in kinds or trainer.treat_whitespace_as_suffix:
        raise UnsupportedModelError(f"the {FILE} is not a byte-fallback BPE model like Llama's; use the -hf checkpoint")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        raise UnsupportedModelError(f"the {FILE} has a normalizer, unlike Llama's; use the -hf checkpoint")


def _spec(proto: Any, prefix: str) -> dict[str, Any]:
    """A tokenizer.json of the pieces, without a post-processor."""
    # sentencepiece gives U+0000 its byte, whatever the pieces say
    pieces = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.piece != "\0"}
    kinds = {piece.piece: piece.type for piece in proto.pieces}
    added = [
        {"id": id, "content": piece, **_PLAIN, "normalized": _SPACE in piece, "special": kinds[piece] != USER_DEFINED}
        for piece, id in pieces.items() if kinds[piece] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if prefix == "each":
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix != "never":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((piece for piece, kind in kinds.items() if kind == UNKNOWN), None)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None if prefix == "first" else {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": metaspace if prefix == "first" else None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": pieces, "merges": _merges(proto),
        },
    }  # fmt: skip


def _merges(proto: Any) -> list[list[str]]:
    """The pairs that make the pieces, by score: of one score the longest first, as in a run from left to right."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL and piece.piece != "\0"}
    cuts = [
        (-score, -len(piece), -cut, piece) for piece, score in scores.items() for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]  # fmt: skip
    return [[piece[:-negative], piece[-negative:]] for _, _, negative, piece in sorted(cuts)]


def _add(spec: dict[str, Any], proto: Any, folder: Path, image_token: str) -> None:
    """Put the added tokens of the other files into a tokenizer.json, at their published ids."""
    vocab, pieces = spec["model"]["vocab"], proto.pieces
    added = {token["content"]: token for token in spec["added_tokens"]}
    for content, token in published_tokens(folder).items():
        id = token["id"]
        if image_token and id == UNK_ID:
            continue
        piece = pieces[id] if id < len(pieces) else None
        if piece is not None and piece.piece != content and content not in vocab:
            if piece.type not in (CONTROL, USER_DEFINED):
                raise CheckpointError(
                    f"token {content!r:.40} has the id {id}, which {FILE} gives to {piece.piece!r:.40}; use the "
                    "tokenizer that belongs to the model"
                )
            del vocab[piece.piece]
            added.pop(piece.piece, None)
        vocab.setdefault(content, id)
        added[content] = {**token, "id": vocab[content], "normalized": False}
    for content in named_tokens(token_settings(folder)).values():
        if content not in vocab and not (image_token and content == pieces[UNK_ID].piece):
            vocab[content] = max(vocab.values()) + 1
            added[content] = {"id": vocab[content], "content": content, **_PLAIN, "special": True}
    spec["added_tokens"] = sorted(added.values(), key=lambda token: int(token["id"]))


def _around(vocab: Mapping[str, int], before: list[str], after: list[str]) -> dict[str, Any]:
    """The post-processor that puts tokens around a text."""
    start, end = ([{"SpecialToken": {"id": token, "type_id": 0}} for token in side] for side in (before, after))
    first, second = ([{"Sequence": {"id": name, "type_id": side}}] for side, name in enumerate("AB"))
    special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (*before, *after)}
    return {
        "type": "TemplateProcessing", "single": [*start, *first, *end], "pair": [*start, *first, *second, *end],
        "special_tokens": special,
    }  # fmt: skip


def _user_defined(proto: Any, vocab: Mapping[str, int]) -> list[str]:
    """A sample with a piece that sentencepiece never divides, if there is one."""
    pieces = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED and piece.piece in vocab]
    return [f"a {pieces[-1]}b {pieces[0]}{pieces[0]} c"] if pieces else []


def _compare(judge: Any, tokenizer: Any, samples: list[str], prefix: str, name: str) -> None:
    for sample in samples:
        text = sample.lstrip(" ") if prefix == "first" else sample  # there no mark is put before a space
        wanted, ids = judge.encode(text), tokenizer.encode(text, add_special_tokens=False)
        if wanted != ids:
            raise CheckpointError(
                f"the {FILE} of {name} gives {wanted[:8]} for {text[:40]!r}, and as tokenizer.json {ids[:8]}; "
                "use the -hf checkpoint"
            )


def _replace_unknown(spec: dict[str, Any], image_token: str) -> None:
    """Replace <unk> in a tokenizer.json by the image token."""
    vocab = spec["model"]["vocab"]
    unknown = next(piece for piece, id in vocab.items() if id == UNK_ID)
    if unknown != spec["model"]["unk_token"]:
        raise UnsupportedModelError(f"token {UNK_ID} of the {FILE} is {unknown!r:.40}, not the unknown one; "
                                    "use the -hf checkpoint")  # fmt: skip
    spec["model"]["vocab"] = {image_token if id == UNK_ID else piece: id for piece, id in vocab.items()}
    spec["model"]["unk_token"] = None
    others = [token for token in spec["added_tokens"] if token["content"] != unknown]
    spec["added_tokens"] = [{"id": UNK_ID, "content": image_token, **_PLAIN, "special": True}, *others]
