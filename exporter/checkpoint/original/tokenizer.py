"""A tokenizer.model, as original LLaVA has it, becomes a tokenizer.json with an image token. In the confined process.

Original LLaVA cuts a prompt at its images and tokenizes each piece by itself, so that every piece begins with a mark of
its own for the space before it. The tokenizer made here does the same: its normalizer prepends that mark to each piece
between added tokens, as transformers' legacy Llama tokenizer did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vtx.exporter.checkpoint.original.parts import IMAGE_TOKEN
from vtx.runtime.errors import CheckpointError, DeviceError, UnsupportedModelError
from vtx.runtime.prompt.tokenizer import rust_errors

FILE = "tokenizer.model"
UNK_ID = 0  # of <unk>, which the image token replaces
UNKNOWN, BPE = 2, 2  # the kind of a piece, and of a model, in sentencepiece's format
_SPACE = "\u2581"
_SAMPLES = (
    "What is this?", " two  spaces ", "\n", "a\tb\r\n", "½ﬁ Å e\u0301", "猫 ねこ кот قط बिल्ली", "👩\u200d🚀",
    "123,456.7",
)  # fmt: skip


def original_tokenizer(folder: Path, name: str, *, own_image_token: bool = False) -> Any:
    """Transformers' tokenizer for the tokenizer.model in `folder`; in place of <unk> it has the image token.

    Text never becomes <unk>, since bytes stand for what has no piece; so its id is free. With an `own_image_token`
    among its added tokens it keeps <unk>.

    Raises:
        CheckpointError: it is damaged, or gives other ids than sentencepiece does.
        UnsupportedModelError: it is no BPE model with bytes for the unknown, or changes text before it cuts it.
        DeviceError: sentencepiece is not installed.

    """
    if not (folder / FILE).exists():
        raise UnsupportedModelError(
            f"{name} has no {FILE}, which the original LLaVA layout needs; take the -hf checkpoint"
        )
    try:
        import sentencepiece
    except ImportError as cause:
        raise DeviceError(f'reading a {FILE} needs sentencepiece; pip install "vtx-edge[export]"') from cause
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast

    with rust_errors(CheckpointError, f"the {FILE} of {name} cannot be read; download it again"):
        judge = sentencepiece.SentencePieceProcessor(model_file=str(folder / FILE))
        proto = _proto(folder / FILE)
    check_kind(proto)
    with rust_errors(CheckpointError, f"transformers cannot convert the {FILE} of {name}; download it again"):
        converted = LlamaTokenizer.from_pretrained(folder, local_files_only=True)
        spec = _spelled(json.loads(converted.backend_tokenizer.to_str()), prefix=proto.normalizer_spec.add_dummy_prefix)
        if not own_image_token:
            spec = _with_image_token(spec)
        bos, eos = (str(getattr(converted, f"{kind}_token")) for kind in ("bos", "eos"))
        spec["post_processor"] = _beginning(bos, spec["model"]["vocab"][bos])
        backend = Tokenizer.from_str(json.dumps(spec))
        make: Any = PreTrainedTokenizerFast
        tokenizer = make(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    for sample in _SAMPLES:
        wanted, found = judge.encode(sample), tokenizer.encode(sample, add_special_tokens=False)
        if wanted != found:
            raise CheckpointError(
                f"the {FILE} of {name} gives {wanted[:8]} for {sample!r}, and as tokenizer.json {found[:8]}; "
                "take the -hf checkpoint"
            )
    return tokenizer


def _proto(path: Path) -> Any:
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(path.read_bytes())
    return proto


def check_kind(proto: Any) -> None:
    """Raise UnsupportedModelError where a tokenizer.model would not give the same ids as tokenizer.json."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != BPE or not trainer.byte_fallback or proto.pieces[0].type != UNKNOWN:
        raise UnsupportedModelError(
            f"the {FILE} is not a BPE model with bytes for the unknown, as Llama's is; take the -hf checkpoint"
        )
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        raise UnsupportedModelError(
            f"the {FILE} changes text before it cuts it, as Llama's does not; take the -hf checkpoint"
        )


def _spelled(spec: dict[str, Any], *, prefix: bool) -> dict[str, Any]:
    """The tokenizer.json with sentencepiece's own treatment of spaces."""
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    spec["normalizer"], spec["pre_tokenizer"] = {"type": "Sequence", "normalizers": steps}, None
    # as sentencepiece's users do, added tokens are cut out before anything is prepended
    spec["added_tokens"] = [{**token, "normalized": False} for token in spec["added_tokens"]]
    return spec


def _with_image_token(spec: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json with the image token for <unk>."""
    vocab = spec["model"]["vocab"]
    unknown = next(piece for piece, id in vocab.items() if id == UNK_ID)
    spec["model"]["vocab"] = {IMAGE_TOKEN if id == UNK_ID else piece: id for piece, id in vocab.items()}
    spec["model"]["unk_token"] = None
    added = [token for token in spec["added_tokens"] if token["content"] != unknown]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": 0, "content": IMAGE_TOKEN, **plain}, *added]
    return spec


def _beginning(bos: str, id: int) -> dict[str, Any]:
    """A prompt begins with the BOS token."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }
