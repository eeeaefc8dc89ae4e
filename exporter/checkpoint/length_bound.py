"""How many characters one token of a tokenizer can stand for, so that a runtime can refuse long text unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import pre_tokenizers

from vtx.runtime.bundle.spec.text_settings import LengthBound

_COUNT_KEPT = ("Lowercase", "NFD", "NFKD", "Prepend")  # never fewer characters than before
_COMPOSING = ("NFC", "NFKC")  # fewer, but of two texts together no more than of each
_SPLITTING = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts", "Sequence")


def length_bound(spec: Mapping[str, Any], control: Mapping[str, int]) -> LengthBound | None:
    """The bound for a tokenizer.json, None where characters may vanish or share a token without end."""
    added = spec["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):  # they take white space with them
        return None
    splitters, normalizers = (
        _parts(spec.get("pre_tokenizer"), "pretokenizers"),
        _parts(spec.get("normalizer"), "normalizers"),
    )
    if not all(_keeps_all(part) for part in splitters) or not _knows_all(spec["model"], splitters):
        return None
    kept = all(_keeps_count(part) for part in normalizers)
    composing = all(_keeps_count(part) or part["type"] in _COMPOSING for part in normalizers)
    if not composing and not all(token["content"] in control for token in added):
        return None  # normalizers see the text between added tokens only, and we would count the whole
    vocab = spec["model"]["vocab"]
    tokens = vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab)
    longest = max(map(len, [*tokens, *(token["content"] for token in added)]), default=0)
    return LengthBound(longest, not kept) if longest else None


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences taken apart."""
    if not isinstance(step, dict):
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[key] for part in _parts(inner, key)]


def _keeps_all(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in _SPLITTING and splitter.get("behavior") != "Removed"


def _keeps_count(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return isinstance(pattern, str) and len(normalizer["content"]) >= len(pattern) > 0
    return normalizer["type"] in _COUNT_KEPT


def _knows_all(model: Mapping[str, Any], splitters: list[dict[str, Any]]) -> bool:
    """Whether every character gets a token of its own at the least, be it for its bytes."""
    vocab = model["vocab"]
    tokens = set(vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab))
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if any(part["type"] == "ByteLevel" for part in splitters):
        return tokens.issuperset(pre_tokenizers.ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return tokens.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    return model["type"] == "BPE" and model.get("unk_token") in tokens and not model.get("fuse_unk")
