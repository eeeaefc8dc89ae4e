"""The tokenizers of small random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import AROUND, PROCESSORS, SPECIALS, VIDEO_TOKEN, Tiny, write_json

WORDS = [
    "the",
    "what",
    "is",
    "how",
    "many",
    "there",
    "picture",
    "image",
    "colour",
    "shape",
    "red",
    "square",
    "circle",
    "describe",
    "which",
    "left",
]


def _merges(count: int, space: str) -> list[tuple[str, str]]:
    """`count` BPE merges that build whole words letter by letter."""
    merges: dict[tuple[str, str], None] = {}
    for word in (space + word for word in WORDS):
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    if count > len(merges):
        raise ValueError(f"{count} merges are asked for, the words give {len(merges)}; use a smaller vocab")
    return list(merges)[:count]


def write_tokenizer(folder: Path, tiny: Tiny) -> int:
    """Write a tokenizer of exactly `tiny.vocab` tokens and return the id of the image token, which is the last."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    metaspace = tiny.tokenizer == "metaspace"
    if metaspace:
        base = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"etaoinshrdlucmfwypvbgkqjxzUSERAITN:?"]
    else:
        base = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIALS.values(), *base]
    around = tiny.around
    merges = _merges(tiny.vocab - len(pieces) - len(around) - 1, "▁" if metaspace else "Ġ")
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=metaspace))
    if metaspace:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", vocab["<s>"])])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    specials = [*SPECIALS.values(), *around, tiny.image_token]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        **SPECIALS,
        "image_token": tiny.image_token,
        "tokenizer_class": "LlamaTokenizer" if metaspace else "PreTrainedTokenizerFast",
        "processor_class": PROCESSORS[tiny.family],
        "model_max_length": tiny.context,
        "clean_up_tokenization_spaces": False,
    }
    if tiny.family.startswith("qwen"):
        settings["video_token"] = VIDEO_TOKEN
    if tiny.family.startswith("gemma"):
        pairs = zip(("boi", "eoi", "audio", "boa", "eoa"), tiny.around, strict=False)
        settings["extra_special_tokens"] = {f"{name}_token": token for name, token in pairs}
        settings["extra_special_tokens"] |= {"image_token": tiny.image_token}
    if tiny.family == "minicpmv4_6":
        from tests.support.families.minicpm import MARKS

        pairs = zip((*MARKS, "image"), (*tiny.around, tiny.image_token), strict=True)
        settings["extra_special_tokens"] = {f"{name}_token": token for name, token in pairs}
    if tiny.family == "lighton_ocr":
        row, image = tiny.around
        settings["extra_special_tokens"] = {"image_token": tiny.image_token, "image_break_token": row}
        settings["extra_special_tokens"] |= {"image_end_token": image}
    if tiny.family == "internvl":
        settings["extra_special_tokens"] = AROUND | {"context_image_token": tiny.image_token}
    if tiny.template_place == "tokenizer_config":
        settings["chat_template"] = tiny.template
    write_json(folder / "tokenizer_config.json", settings)
    return tiny.vocab - 1
