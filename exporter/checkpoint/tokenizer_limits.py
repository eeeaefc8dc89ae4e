"""What a tokenizer.json of a stranger may hold: bounds on ids and strings, checked before it is loaded and after."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from vtx.runtime.bundle.spec.text_settings import MAX_ID
from vtx.runtime.errors import CheckpointError

MAX_STRING = 1024  # characters of an added token, or of a string that a normalizer or decoder writes
MAX_GROWTH = 1024  # characters that normalizers may make of one
MAX_PARTS = 256  # of a normalizer, pre-tokenizer, post-processor or decoder, those within parts included
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CURE = "take the tokenizer that belongs to the model"


def check_spec(spec: Any) -> None:
    """Raise `CheckpointError` where a parsed tokenizer.json goes beyond a bound; other faults are its loader's."""
    if not isinstance(spec, dict):
        raise CheckpointError(f"tokenizer.json is a JSON {type(spec).__name__}, not an object; {_CURE}")
    for token, id in _ids(spec):
        if not isinstance(id, int) or not 0 <= id <= MAX_ID:
            raise CheckpointError(
                f"tokenizer.json: the id of token {str(token)[:40]!r} is {repr(id)[:40]}, the limit is "
                f"{MAX_ID:,}; {_CURE}"
            )
    for token in _added(spec):
        _check_string("an added token", token.get("content"))
    for step in _STEPS:
        parts = list(_objects(spec.get(step)))
        if len(parts) > MAX_PARTS:
            raise CheckpointError(
                f"tokenizer.json: the {step} has {len(parts)} parts, the limit is {MAX_PARTS}; {_CURE}"
            )
        for part in parts:
            for name, value in part.items():
                if name != "precompiled_charsmap":
                    _check_string(f"{name} of the {step}", value)
    for step in ("normalizer", "decoder"):
        growth = prod(_growth(part) for part in _objects(spec.get(step)))
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"tokenizer.json: the {step} makes up to {growth:,} characters of one, the limit is "
                f"{MAX_GROWTH:,}; {_CURE}"
            )


def check_bytes(spec: Mapping[str, Any], name: str) -> None:
    """Raise `CheckpointError` where tokens that stand for a byte are special.

    What a user types would be made of special tokens then, and could not be told from the template's.
    """
    marked = [
        token["content"]
        for token in _added(spec)
        if token.get("special") and _BYTE_TOKEN.fullmatch(str(token.get("content")))
    ]
    if marked and spec["model"].get("byte_fallback"):
        more = f" and {len(marked) - 1} more byte tokens" if len(marked) > 1 else ""
        raise CheckpointError(
            f"the tokenizer of {name} marks {marked[0]}{more} as special; byte tokens must be ordinary: take them "
            "out of the added tokens in tokenizer.json and tokenizer_config.json"
        )


def _check_string(name: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_STRING:
        raise CheckpointError(
            f"tokenizer.json: {name} has {len(value):,} characters, the limit is {MAX_STRING:,}; {_CURE}"
        )


def _ids(spec: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    model = spec.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from vocab.items()
    for token in _added(spec):
        yield token.get("content"), token.get("id")


def _added(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = spec.get("added_tokens")
    return [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value, itself included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _growth(part: Mapping[str, Any]) -> int:
    """How many characters a normalizer or decoder may make of one."""
    content = part.get("content") if part.get("type") == "Replace" else None
    return max(1, len(content)) if isinstance(content, str) else 1
