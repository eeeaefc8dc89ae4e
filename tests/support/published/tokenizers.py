"""Real tokenizers for published models: pieces of their kind, added tokens at their published ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.published.places import PACKAGES, published, read

BYTES = ("idefics3", "smolvlm", "pixtral")  # of these model_types pieces are bytes, whatever the text model is
NEEDS = {
    "mistral": "llama2",
    "gemma": "gemini",
    "gemma2": "gemini",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma3",
}  # npm packages
# Added tokens that no file in a model's folder states, by model_type.
_LETTERS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_SMOLVLM = {
    **_LETTERS, "<global-img>": 49152,
    **{f"<row_{n // 6 + 1}_col_{n % 6 + 1}>": 49153 + n for n in range(36)},
    "<fake_token_around_image>": 49189, "<image>": 49190, "<end_of_utterance>": 49279,
}  # fmt: skip
_LFM2 = {
    "<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7, "<image>": 396,
    **{f"<|img_row_{n // 10 + 1}_col_{n % 10 + 1}|>": 397 + n for n in range(100)},
    "<|img_thumbnail|>": 497, "<|image_start|>": 498, "<|image_end|>": 499,
}  # fmt: skip
_QWEN3_5 = {
    "<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<|vision_start|>": 248053,
    "<|vision_end|>": 248054, "<|vision_pad|>": 248055, "<|image_pad|>": 248056, "<|video_pad|>": 248057,
    "<think>": 248068, "</think>": 248069,
}  # fmt: skip
_MINICPM = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
ADDED: dict[str, dict[str, int]] = {
    "idefics3": _SMOLVLM,
    "smolvlm": _SMOLVLM,
    "lfm2_vl": _LFM2,
    "llava_next": {"<|end_of_text|>": 0, "<image>": 49155, "<|user|>": 49152, "<|system|>": 49153, "<|pad|>": 49154},
    "llava_next_video": {"<unk>": 0, "<s>": 1, "</s>": 2, "<video>": 32000, "<image>": 32001, "<pad>": 32002},
    "video_llava": {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<video>": 32001, "<pad>": 32002},
    "pixtral": {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4, "[IMG]": 10, "<pad>": 11,
                "[IMG_BREAK]": 12, "[IMG_END]": 13},
    "minicpmv4_6": {**_QWEN3_5, **{token: 248077 + n for n, token in enumerate(_MINICPM)}},
    "gemma4": {
        "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|turn>": 105, "<turn|>": 106,
        "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50,
        "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101,
        "<|image>": 255999, "<|audio>": 256000, "<|image|>": 258880, "<|audio|>": 258881, "<image|>": 258882,
        "<audio|>": 258883, "<|video|>": 258884,
    },
}  # fmt: skip
ROLES = {  # of settings that a folder lacks, without which transformers knows no special token
    "idefics3": {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"},
    "lfm2_vl": {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
    "llava_next": {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"},
    "llava_next_video": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
ROLES |= {"smolvlm": ROLES["idefics3"], "video_llava": ROLES["llava_next_video"]}


SENTENCEPIECE = ("llama", "internlm2")


def _package(model: str, text: str) -> str:
    """The name of the package, or of the folder in `SENTENCEPIECE`, that holds the pieces."""
    if model in BYTES:
        return "qwen3"
    return text if text in SENTENCEPIECE else NEEDS.get(text, "qwen3")


def missing(model: str, text: str) -> str | None:
    """Why there is no tokenizer for this model_type with that text model, or None."""
    package = _package(model, text)
    if package in SENTENCEPIECE:
        return None if (published() / "tokenizers" / package).is_dir() else f"no tokenizers/{package} in {published()}"
    absent = not (PACKAGES / package / "tokenizer.json").exists()
    return f"its tokenizer is not in {PACKAGES / package}; `make published` fetches it with npm" if absent else None


def write_tokenizer(folder: Path, model: str, text: str, vocab: int) -> None:
    """Put a tokenizer of at most `vocab` tokens into the folder of a checkpoint, beside its published settings."""
    if (folder / "tokenizer.json").exists() or (folder / "tokenizer.model").exists():
        return
    settings = read(folder / "tokenizer_config.json")
    if not settings and model in ROLES:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES[model], "clean_up_tokenization_spaces": False}
        if (model.startswith("lla") and text == "llama") or model == "video_llava":
            settings["tokenizer_class"] = "LlamaTokenizer"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    package, added = _package(model, text), _added(folder, model, settings)
    if package in SENTENCEPIECE:
        files = published() / "tokenizers" / package
        shutil.copyfile(files / "tokenizer.model", folder / "tokenizer.model")
        if package == "internlm2" or model in ("llava_llama", "vila"):  # published without another file
            return
        base = read(files / "openvla-tokenizer.json")
    else:
        base = read(PACKAGES / package / "tokenizer.json")
    if package == "qwen3":
        _lay_out(base, added, vocab)
    elif model == "gemma4":
        _rename(base, added)
    known = {token["content"]: token for token in base["added_tokens"]}
    default = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    flags = settings.get("added_tokens_decoder", {})
    base["added_tokens"] = [
        {**default, **known.get(token, {}), **flags.get(str(id), {}), "id": id, "content": token}
        for token, id in sorted(added.items(), key=lambda pair: pair[1])
    ]
    (folder / "tokenizer.json").write_text(json.dumps(base, ensure_ascii=False), encoding="utf-8")


def _added(folder: Path, model: str, settings: dict[str, Any]) -> dict[str, int]:
    """Ids of added tokens as the folder's files state them, or as `ADDED` does."""
    stated = {token["content"]: int(id) for id, token in settings.get("added_tokens_decoder", {}).items()}
    return stated or read(folder / "added_tokens.json") or ADDED.get(model, {})


def _lay_out(tokenizer: dict[str, Any], added: dict[str, int], size: int) -> None:
    """Qwen's pieces in their order at the ids that no added token takes, fillers up to the last of those."""
    pieces = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    taken, last = set(added.values()), max(added.values())
    free = [id for id in range(min(size, max(len(pieces), last + 1))) if id not in taken]
    vocab = dict(zip(pieces, free, strict=False))
    vocab |= {f"<|filler_{id}|>": id for id in free[len(pieces) :] if id < last}
    vocab |= {token: id for token, id in added.items() if id < free[-1]}
    _replace(tokenizer, vocab)


def _rename(tokenizer: dict[str, Any], added: dict[str, int]) -> None:
    """Added tokens in place of the pieces that have their ids: unused ones, and names that changed."""
    by_id = {id: token for token, id in added.items()}
    _replace(tokenizer, {by_id.get(id, piece): id for piece, id in tokenizer["model"]["vocab"].items()})


def _replace(tokenizer: dict[str, Any], vocab: dict[str, int]) -> None:
    """Another vocabulary, and the merges whose pieces it has."""
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in tokenizer["model"]["merges"])
    tokenizer["model"]["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    tokenizer["model"]["vocab"] = vocab
