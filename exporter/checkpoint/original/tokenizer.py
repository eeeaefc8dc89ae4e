"""Original LLaVA's tokenizer.model as a tokenizer.json with an image token. Runs in the confined process.

Original LLaVA splits a prompt at its images and tokenizes each piece separately, so every piece begins with the mark
of a space. The tokenizer made here does the same: its normalizer prepends that mark to each piece between added tokens,
as transformers' legacy Llama tokenizer did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vtx.runtime.errors import CheckpointError, DeviceError, UnsupportedModelError
from vtx.runtime.prompt.tokenizer import rust_errors

FILE = "tokenizer.model"
IMAGE_TOKEN = "<image>"
UNK_ID = 0  # of <unk>, which the image token replaces
UNKNOWN, BPE = 2, 2  # a kind of piece and of model in sentencepiece's format
_SPACE = "\u2581"
_SAMPLES = (
    "What is this?", " two  spaces ", "\n", "a\tb\r\n", "½ﬁ Å e\u0301", "猫 ねこ кот قط बिल्ली", "👩\u200d🚀",
    "123,456.7",
)  # fmt: skip


def original_tokenizer(folder: Path, name: str, *, own_image_token: bool = False) -> Any:
    """Transformers' tokenizer for the tokenizer.model in `folder`, with the image token instead of <unk>.

    Text without a piece becomes bytes and never <unk>, whose id is free. With an `own_image_token` among its added
    tokens it keeps <unk>. Raises CheckpointError, UnsupportedModelError, DeviceError.
    """
    if not (folder / FILE).exists():
        raise UnsupportedModelError(
            f"{name} has no {FILE}, which the original LLaVA layout needs; use the -hf checkpoint"
        )
    try:
        import sentencepiece
    except ImportError as cause:
        raise DeviceError(f'reading a {FILE} needs sentencepiece; pip install "vtx-edge[export]"') from cause
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import import_protobuf

    with rust_errors(CheckpointError, f"the {FILE} of {name} cannot be read; download it again"):
        judge = sentencepiece.SentencePieceProcessor(model_file=str(folder / FILE))
        proto = import_protobuf().ModelProto()
        proto.ParseFromString((folder / FILE).read_bytes())
    check_kind(proto)
    with rust_errors(CheckpointError, f"transformers cannot convert the {FILE} of {name}; download it again"):
        converted = LlamaTokenizer.from_pretrained(folder, local_files_only=True)
        spec = json.loads(converted.backend_tokenizer.to_str())
        # sentencepiece's treatment of spaces; like its users, cut out added tokens before anything is prepended
        steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        if proto.normalizer_spec.add_dummy_prefix:
            steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        spec["normalizer"], spec["pre_tokenizer"] = {"type": "Sequence", "normalizers": steps}, None
        spec["added_tokens"] = [{**token, "normalized": False} for token in spec["added_tokens"]]
        if not own_image_token:
            _replace_unknown(spec)
        bos, eos = (str(getattr(converted, f"{kind}_token")) for kind in ("bos", "eos"))
        start, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [spec["model"]["vocab"][bos]], "tokens": [bos]}},
        }
        backend = Tokenizer.from_str(json.dumps(spec))
        make: Any = PreTrainedTokenizerFast
        tokenizer = make(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    for sample in _SAMPLES:
        wanted, found = judge.encode(sample), tokenizer.encode(sample, add_special_tokens=False)
        if wanted != found:
            raise CheckpointError(
                f"the {FILE} of {name} gives {wanted[:8]} for {sample!r}, and as tokenizer.json {found[:8]}; "
                "use the -hf checkpoint"
            )
    return tokenizer


def check_kind(proto: Any) -> None:
    """Raise UnsupportedModelError if a tokenizer.model would not give the same ids as tokenizer.json."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != BPE or not trainer.byte_fallback or proto.pieces[0].type != UNKNOWN:
        raise UnsupportedModelError(f"the {FILE} is not a byte-fallback BPE model like Llama's; use the -hf checkpoint")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        raise UnsupportedModelError(f"the {FILE} has a normalizer, unlike Llama's; use the -hf checkpoint")


def _replace_unknown(spec: dict[str, Any]) -> None:
    """Replace <unk> in a tokenizer.json by the image token."""
    vocab = spec["model"]["vocab"]
    unknown = next(piece for piece, id in vocab.items() if id == UNK_ID)
    spec["model"]["vocab"] = {IMAGE_TOKEN if id == UNK_ID else piece: id for piece, id in vocab.items()}
    spec["model"]["unk_token"] = None
    added = [token for token in spec["added_tokens"] if token["content"] != unknown]
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": 0, "content": IMAGE_TOKEN, **options}, *added]
