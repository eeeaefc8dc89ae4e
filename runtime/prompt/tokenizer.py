"""The `tokenizers` library with our errors, a tokenizer without its control tokens, and text as it arrives."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from tokenizers import Encoding, Tokenizer

from vtx.runtime.errors import BundleError, RequestError, VtxError


def parse_tokenizer(text: str, error: type[VtxError]) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises `error`."""
    with rust_errors(error, "the tokenizer.json is damaged"):
        tokenizer: Tokenizer = Tokenizer.from_str(text)
        return tokenizer


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Ids and offsets of `text`. Raises `RequestError`."""
    with rust_errors(RequestError, "the tokenizer cannot encode the conversation"):
        encoding: Encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of `ids` without special tokens. Raises `BundleError`."""
    with rust_errors(BundleError, "the tokenizer cannot decode the answer"):
        return str(tokenizer.decode(ids, skip_special_tokens=True))


@contextmanager
def rust_errors(kind: type[VtxError], message: str) -> Iterator[None]:
    """`tokenizers` raises bare exceptions, and panics that derive from BaseException; both become `kind`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message}: {' '.join(str(error).split())[:200]}") from error


def without_control_tokens(tokenizer: Tokenizer, control: Mapping[str, int]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer without the `control` tokens, for the start of a prompt and for text after a control token.

    They are renamed, not removed, so that all other ids stay: nobody can type the new names.
    """
    names = {token: f"\0{secrets.token_hex(16)}" for token in control}
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    spec["post_processor"] = None
    model: dict[str, Any] = spec["model"]
    if isinstance(vocab := model["vocab"], dict):
        model["vocab"] = {names.get(token, token): id for token, id in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:  # those that would make a renamed token go
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
    text = json.dumps(spec)
    never = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    return parse_tokenizer(text, BundleError), parse_tokenizer(never, BundleError)


class Detokenizer:
    """Text of one answer, token by token: never half a character, and in total the text of `Text.decode`."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: Set[int], byte_tokens: Set[int | None]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes = byte_tokens
        # Ids since the last but one piece: the older ones give the decoder its context, `_shown` is their text.
        self._window: list[int] = []
        self._context = 0
        self._shown = ""

    def push(self, id: int) -> str:
        """The text that token `id` makes certain; may be empty."""
        if id in self._hidden or self._tokenizer.id_to_token(id) is None:
            return ""
        self._window.append(id)
        # Byte tokens in a row are decoded together: one wrong byte changes the characters before it.
        if id in self._bytes:
            return ""
        text = decode(self._tokenizer, self._window)
        piece = text[len(self._shown) :]
        if not piece or text.endswith("\ufffd"):
            return ""
        del self._window[: self._context]
        self._context = len(self._window)
        self._shown = decode(self._tokenizer, self._window)
        return piece

    def finish(self) -> str:
        """The rest, with U+FFFD for an incomplete character."""
        piece = decode(self._tokenizer, self._window)[len(self._shown) :]
        self._window, self._context, self._shown = [], 0, ""
        return piece
