"""A sentencepiece tokenizer.model as a tokenizer.json with the same ids. Runs in the confined process.

Original LLaVA splits a prompt at its images and tokenizes each piece separately, so every piece begins with the mark
of a space. The tokenizer made for it does the same: its normalizer prepends that mark to each piece between added
tokens, as transformers' legacy Llama tokenizer did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from vtx.exporter.checkpoint.published_ids import (
    UNK_ID,
    PublishedToken,
    published_tokens,
    texts_of,
    token_settings,
)
from vtx.runtime.errors import CheckpointError, DeviceError, UnsupportedModelError
from vtx.runtime.installing import install
from vtx.runtime.prompt.tokenizer import rust_errors

FILE = "tokenizer.model"
IMAGE_TOKEN = "<image>"
BPE = 2  # a kind of model in sentencepiece's format
NORMAL = 1  # kinds of its pieces
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
_SPACE = "\u2581"
_SAMPLES = (
    "What is this?",
    " two  spaces ",
    "\n",
    "a\tb\r\n",
    "½ﬁ Å e\u0301",
    "猫 ねこ кот قط बिल्ली",
    "👩\u200d🚀",
    "123,456.7",
    "a   b    c       d" + 17 * " " + "e" + 40 * " ",
    "=" * 37 + "-" * 19,
    "<0x41>\0",
)


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
        raise DeviceError(f"reading a {FILE} needs sentencepiece; {install('export')}") from cause
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import import_protobuf

    with rust_errors(CheckpointError, f"the {FILE} of {name} cannot be read; download it again"):
        judge = sentencepiece.SentencePieceProcessor(model_file=str(folder / FILE))
        proto = import_protobuf().ModelProto()
        proto.ParseFromString((folder / FILE).read_bytes())
    check_kind(proto)
    if image_token and proto.pieces[UNK_ID].type != UNKNOWN:
        raise UnsupportedModelError(f"token {UNK_ID} of the {FILE} is not the unknown one; use the -hf checkpoint")
    vocab, added = _tokens(proto, folder, image_token)
    unknown = _unknown(proto, vocab)
    settings = token_settings(folder)
    kinds = ["bos", "eos"] if image_token else ["bos", "eos", "unk", "pad"]
    usual = {"bos": proto.trainer_spec.bos_piece, "eos": proto.trainer_spec.eos_piece, "unk": unknown}
    names = {kind: next(texts_of(settings.get(f"{kind}_token", usual.get(kind))), None) for kind in kinds}
    with rust_errors(CheckpointError, f"the {FILE} of {name} cannot be converted; download it again"):
        bpe = models.BPE(vocab, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(bpe)
        backend.add_tokens(added)
        prefix = prefix if proto.normalizer_spec.add_dummy_prefix else "never"
        _add_spaces(backend, prefix)
        _add_ends(backend, vocab, names, settings)
        make: Any = PreTrainedTokenizerFast
        tokenizer = make(tokenizer_object=backend, **{f"{kind}_token": token for kind, token in names.items() if token})
    symbols = [p.piece for p in proto.pieces if p.type == USER_DEFINED and p.piece in vocab]
    texts = [*_SAMPLES, *(f"a {symbol * 2}b" for symbol in symbols)]
    if prefix == "first":  # there no mark is put before a space
        texts = [text.lstrip(" ") for text in texts]
    _compare(name, judge, tokenizer, texts)
    return tokenizer


def _unknown(proto: Any, vocab: Mapping[str, int]) -> str | None:
    """The text of the unknown token, if there is one."""
    return next((p.piece for p in proto.pieces if p.type == UNKNOWN and p.piece in vocab), None)


def _compare(name: str, judge: Any, tokenizer: Any, texts: Sequence[str]) -> None:
    """Raise CheckpointError if a tokenizer gives other ids for a text than sentencepiece, the `judge`."""
    for text in texts:
        expected = judge.encode(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if expected != ids:
            raise CheckpointError(
                f"the {FILE} of {name} gives {expected[:8]} for {text[:40]!r}, and as tokenizer.json {ids[:8]}; "
                "use the -hf checkpoint"
            )


def check_kind(proto: Any) -> None:
    """Raise UnsupportedModelError if a tokenizer.model would not give the same ids as tokenizer.json."""
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    unused = any(piece.type == UNUSED for piece in proto.pieces)
    if trainer.model_type != BPE or not trainer.byte_fallback or unused or trainer.treat_whitespace_as_suffix:
        raise UnsupportedModelError(f"the {FILE} is not a byte-fallback BPE model like Llama's; use the -hf checkpoint")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        raise UnsupportedModelError(f"the {FILE} has a normalizer, unlike Llama's; use the -hf checkpoint")


def _tokens(proto: Any, folder: Path, image_token: str) -> tuple[dict[str, int], list[AddedToken]]:
    """The ids of all tokens, and the added ones: those of the model, and of the other files at their published ids."""
    # sentencepiece gives U+0000 its byte, whatever the pieces say
    vocab = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.piece != "\0"}
    marked = set[str]()
    added = dict[str, AddedToken]()
    for piece in proto.pieces:
        if piece.piece not in vocab or piece.type not in (UNKNOWN, CONTROL, USER_DEFINED):
            continue
        symbol = piece.type == USER_DEFINED
        # sentencepiece finds symbols in the text with its marks of spaces, hence normalized; a prefix would be theirs,
        # too
        if symbol and not proto.normalizer_spec.add_dummy_prefix:
            marked.add(piece.piece)
        added[piece.piece] = AddedToken(piece.piece, normalized=piece.piece in marked, special=not symbol)
    published = published_tokens(folder)
    if image_token:
        unknown = proto.pieces[UNK_ID].piece
        published = {content: token for content, token in published.items() if token.id != UNK_ID}
        published[image_token] = PublishedToken(UNK_ID, {"special": True})
        vocab[image_token] = vocab.pop(unknown)
        del added[unknown]
    for content, (id, options) in published.items():
        if content not in vocab and id < len(proto.pieces):
            former = _replaceable(proto.pieces[id], content, id)
            del vocab[former], added[former]
        vocab.setdefault(content, id)
        normalized = content in marked and not options["special"]
        added[content] = AddedToken(content, **{**options, "normalized": normalized})
    return vocab, list(added.values())


def _replaceable(piece: Any, content: str, id: int) -> str:
    """The text of a piece whose id a published token has. Raises CheckpointError if it is of another kind."""
    if piece.type not in (CONTROL, USER_DEFINED):
        raise CheckpointError(
            f"token {content!r:.40} has the id {id}, which {FILE} gives to {piece.piece!r:.40}; use the "
            "tokenizer that belongs to the model"
        )
    text: str = piece.piece
    return text


def _merges(proto: Any) -> list[tuple[str, str]]:
    """The pairs that make the pieces, by score: of one score the longest first, as in a run from left to right."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL and piece.piece != "\0"}
    cuts = [
        (-score, -len(piece), -cut, piece)
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(piece[:-negative], piece[-negative:]) for _, _, negative, piece in sorted(cuts)]


def _add_spaces(backend: Tokenizer, prefix: str) -> None:
    """Let a tokenizer treat spaces as sentencepiece does, with a mark before each text, before the first, or never."""
    marks: list[Any] = [normalizers.Prepend(_SPACE)] if prefix == "each" else []
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)


def _add_ends(
    backend: Tokenizer, vocab: Mapping[str, int], names: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Let a tokenizer put the tokens around a text that the settings ask for."""
    before = [names["bos"]] if names["bos"] in vocab and settings.get("add_bos_token") is not False else []
    after = [names["eos"]] if names["eos"] in vocab and settings.get("add_eos_token") is True else []
    backend.post_processor = processors.TemplateProcessing(
        [*before, "$A", *after], special_tokens=[(token, vocab[token]) for token in before + after]
    )
