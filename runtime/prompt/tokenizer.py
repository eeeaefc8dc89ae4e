"""The `tokenizers` library with our errors, special tokens that a user types as text, and text as it arrives."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from vtx.runtime.errors import BundleError, RequestError, VtxError
from vtx.runtime.prompt.messages import Message, Part, extras_of, texts_of

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


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


class Masking:
    """Masks messages, so that special tokens in them stay text, and encodes the text rendered from them.

    The first character of each such token becomes a private-use character that occurs nowhere else. So the control
    tokens found in the chat template's output are always its own. Text between those is unmasked and encoded by the
    tokenizer without control tokens. Safe for many threads. `control` holds the ids of the control tokens by their
    text, `literals` every character that a template may print.
    """

    def __init__(self, tokenizer: Tokenizer, control: Mapping[str, int], unk_token: str | None, literals: str) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._ids = frozenset(control.values())
        self._taken = frozenset(literals).union(*control)
        unk = getattr(tokenizer.model, "unk_token", None) or unk_token
        self._unk_id = tokenizer.token_to_id(unk) if unk else None
        self._typed = self._ids - {self._unk_id}  # ids that text must not become
        self._pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")

    def mask(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """The messages with special tokens masked, and the masking character of each character masked."""
        masks: dict[str, str] = {}
        masked: list[Message] = []

        def values(value: Any) -> Any:
            if isinstance(value, str):
                return self._mask_text(value, masks, messages)
            if isinstance(value, Mapping):
                return {values(name): values(item) for name, item in value.items()}
            return [values(item) for item in value] if isinstance(value, list | tuple) else value

        for message in messages:
            role = self._mask_text(message["role"], masks, messages)
            content = message["content"]
            extras = values(extras_of(message))
            # A special token may span two parts, so a message is masked as one text and cut again.
            text = self._mask_text("".join(texts_of(message)), masks, messages)
            at = 0
            if isinstance(content, str):
                masked.append(cast("Message", {"role": role, "content": text, **extras}))
                continue
            parts: list[Part] = []
            for part in content:
                parts.append({"type": part["type"]})
                if part["type"] == "text":
                    at += len(part["text"])
                    parts[-1]["text"] = text[at - len(part["text"]) : at]
            masked.append(cast("Message", {"role": role, "content": parts, **extras}))
        return masked, masks

    def encode(self, rendered: str, masks: Mapping[str, str], encoding: Encoding) -> list[int]:
        """The ids of the template's own control tokens in `encoding`, and of the text between them as ordinary text."""
        unmask = str.maketrans({mark: character for character, mark in masks.items()})
        at_start, elsewhere = self._text_tokenizers
        tokens = list(zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True))
        ids = [id for id, _, _ in takewhile(itemgetter(2), tokens)]
        suffix = [id for id, _, _ in takewhile(itemgetter(2), reversed(tokens[len(ids) :]))]
        position = 0
        for id, (start, end), inserted in [*tokens, (None, (len(rendered), len(rendered)), 0)]:
            own = id is None or (id in self._ids and (id != self._unk_id or rendered[start:end] in self._control))
            if inserted or not own:
                continue
            piece = rendered[position:start].translate(unmask)
            ids += encode(elsewhere if position else at_start, piece).ids if piece else []
            ids += [] if id is None else [id]
            position = end
        return ids + suffix[::-1]

    def continuation(self, before: str, text: str) -> list[int]:
        """The ids of `text` behind the rendered `before`; control tokens in `text` are ordinary text."""
        start = max((match.end() for match in self._pattern.finditer(before)), default=0)
        known = before[start:]
        elsewhere = self._text_tokenizers[1]
        tokenizer = elsewhere if start else self._text_tokenizers[0]
        prefix = encode(tokenizer, known).ids
        ids = encode(tokenizer, known + text).ids
        return list(ids[len(prefix) :] if ids[: len(prefix)] == prefix else encode(elsewhere, text).ids)

    @cached_property
    def _text_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizer without the control tokens, for the start of a prompt and for text after a control token.

        They are renamed, not removed, so that all other ids stay: nobody can type the new names.
        """
        names = {token: f"\0{secrets.token_hex(16)}" for token in self._control}
        spec = json.loads(self._tokenizer.to_str())
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

    def _mask_text(self, text: str, masks: dict[str, str], messages: Sequence[Message]) -> str:
        while True:
            starts = list(map(re.Match.start, self._pattern.finditer(text)))
            if not starts and self._tokenizer.normalizer is not None:  # which may make control tokens of other text
                encoding = encode(self._tokenizer, text)
                if not self._typed.isdisjoint(encoding.ids):
                    tokens = zip(encoding.ids, encoding.offsets, strict=True)
                    starts = [start for id, (start, end) in tokens if start < end and id in self._typed]
            if not starts:
                return text
            characters = list(text)
            for spot in starts:
                character = characters[spot]
                if character not in masks:
                    written = (json.dumps(extras_of(message), ensure_ascii=False) for message in messages)
                    taken = self._taken.union(masks.values(), *map("".join, map(texts_of, messages)), *written)
                    free = (char for code in chain(*_PRIVATE_USE) if (char := chr(code)) not in taken)
                    masks[character] = "" if character in masks.values() else next(free, "")
                if not masks[character]:
                    raise RequestError(f"the special token at character {spot} cannot be kept as text; leave it out")
                characters[spot] = masks[character]
            text = "".join(characters)


# The bytes of byte-level tokens, by the characters that stand for them: printable ones stand for themselves.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text; a character may take several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = tokenizer.decoder
        self._tokenizer = tokenizer
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def __call__(self, id: int) -> bytes:
        """The bytes of a token; none of one that is in no table."""
        piece = self._tokenizer.id_to_token(id) or ""
        if self._byte_level and all(char in BYTE_OF for char in piece):
            return bytes(BYTE_OF[char] for char in piece)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


class Detokenizer:
    """Text of one answer, token by token: never half a character, and in total the text of `Text.decode`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hidden: Set[int],
        byte_tokens: Set[int | None],
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`marks`: special tokens that have a text here."""
        self.marks = marks or {}
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes = byte_tokens
        # Ids since the last but one piece: the older ones give the decoder its context, `_shown` is their text.
        self._window: list[int] = []
        self._context = 0
        self._shown = ""

    def push(self, id: int) -> str:
        """The text that token `id` makes certain; may be empty."""
        if id in self.marks:
            return self.finish() + self.marks[id]
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
        self._window = []
        self._context = 0
        self._shown = ""
        return piece
