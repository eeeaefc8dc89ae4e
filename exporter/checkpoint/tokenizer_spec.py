"""A parsed tokenizer.json: bounds on untrusted ones, and the number of characters that one token can stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from tokenizers import pre_tokenizers

from vtx.runtime.bundle.spec.text_settings import MAX_ID, LengthBound
from vtx.runtime.errors import CheckpointError

MAX_STRING = 1024  # characters of an added token, or of a string that a normalizer or decoder writes
MAX_GROWTH = 1024  # characters that normalizers may make of one
MAX_PARTS = 256  # of a normalizer, pre-tokenizer, post-processor or decoder, nested parts included
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_FIX = "use the tokenizer that belongs to the model"
_COUNT_KEPT = ("Lowercase", "NFD", "NFKD", "Prepend")  # never fewer characters than before
_COMPOSING = ("NFC", "NFKC")  # fewer, but of two texts together no more than of each
_SPLITTING = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts", "Sequence")


def check_spec(spec: Any) -> None:
    """Raise `CheckpointError` if a tokenizer.json exceeds a bound; its loader finds other faults."""
    if not isinstance(spec, dict):
        raise CheckpointError(f"tokenizer.json is a JSON {type(spec).__name__}, not an object; {_FIX}")
    _check_ids(spec)
    steps = {step: list(_objects(spec.get(step))) for step in _STEPS}
    strings = [("an added token", token.get("content")) for token in _added(spec)]
    for step, parts in steps.items():
        if len(parts) > MAX_PARTS:
            raise CheckpointError(
                f"tokenizer.json: the {step} has {len(parts)} parts, the limit is {MAX_PARTS}; {_FIX}"
            )
        values = [item for part in parts for item in part.items() if item[0] != "precompiled_charsmap"]
        strings += [(f"{name} of the {step}", value) for name, value in values]
    for name, value in strings:
        if isinstance(value, str) and len(value) > MAX_STRING:
            raise CheckpointError(
                f"tokenizer.json: {name} has {len(value):,} characters, the limit is {MAX_STRING:,}; {_FIX}"
            )
    for step in ("normalizer", "decoder"):
        growth = _growth(steps[step])
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"tokenizer.json: the {step} makes up to {growth:,} characters of one, the limit is "
                f"{MAX_GROWTH:,}; {_FIX}"
            )


def _growth(parts: Sequence[Mapping[str, Any]]) -> int:
    """The most characters that a step makes of one."""
    contents = [part.get("content") for part in parts if part.get("type") == "Replace"]
    return prod(max(1, len(content)) for content in contents if isinstance(content, str))


def _check_ids(spec: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for the id of a token that is no id."""
    model = spec.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    listed = vocab.items() if isinstance(vocab, dict) else ()
    for token, id in (*listed, *((token.get("content"), token.get("id")) for token in _added(spec))):
        if not isinstance(id, int) or not 0 <= id <= MAX_ID:
            raise CheckpointError(
                f"tokenizer.json: the id of token {str(token)[:40]!r} is {repr(id)[:40]}, the limit is "
                f"{MAX_ID:,}; {_FIX}"
            )


def check_bytes(spec: Mapping[str, Any], name: str) -> None:
    """Raise `CheckpointError` if byte tokens are special: a user's text would become special tokens."""
    tokens = [token["content"] for token in _added(spec) if token.get("special")]
    special = [token for token in tokens if _BYTE_TOKEN.fullmatch(str(token))]
    if special and spec["model"].get("byte_fallback"):
        remark = f" and {len(special) - 1} more byte tokens" if len(special) > 1 else ""
        raise CheckpointError(
            f"the tokenizer of {name} marks {special[0]}{remark} as special; byte tokens must be ordinary: remove them "
            "from the added tokens in tokenizer.json and tokenizer_config.json"
        )


def _added(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = spec.get("added_tokens")
    return [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def length_bound(spec: Mapping[str, Any], control: Mapping[str, int]) -> LengthBound | None:
    """The most characters of a token, to refuse long text unread; None if they may vanish or share without limit."""
    added = spec["added_tokens"]
    model = spec["model"]
    vocab = spec["model"]["vocab"]
    tokens = set(vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab))
    splitters = _sequence(spec.get("pre_tokenizer"), "pretokenizers")
    normalizers = _sequence(spec.get("normalizer"), "normalizers")
    if _drops_text(splitters, added) or not _complete(model, tokens, splitters):
        return None
    same_count = all(map(_keeps_count, normalizers))
    composing = same_count or all(_keeps_count(part) or part["type"] in _COMPOSING for part in normalizers)
    contents = [token["content"] for token in added]
    if not composing and not control.keys() >= {*contents}:
        return None  # normalizers get the text between added tokens only, and the bound counts the whole
    longest = max(map(len, [*tokens, *contents]), default=0)
    return LengthBound(longest, not same_count) if longest else None


def _drops_text(splitters: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if text may vanish between tokens, or an added token also consumes white space."""
    if any(part["type"] not in _SPLITTING or part.get("behavior") == "Removed" for part in splitters):
        return True
    return any(token["lstrip"] or token["rstrip"] for token in added)


def _complete(model: Mapping[str, Any], tokens: set[str], splitters: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if every character has a token of its own at least, or tokens for its bytes."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if any(part["type"] == "ByteLevel" for part in splitters):
        return tokens.issuperset(pre_tokenizers.ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return tokens.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    return model["type"] == "BPE" and model.get("unk_token") in tokens and not model.get("fuse_unk")


def _sequence(step: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(step, dict):
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[key] for part in _sequence(inner, key)]


def _keeps_count(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return isinstance(pattern, str) and len(normalizer["content"]) >= len(pattern) > 0
    return normalizer["type"] in _COUNT_KEPT
