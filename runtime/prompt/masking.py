"""Special tokens that a user types stay text.

They are masked before the conversation is rendered: the first character of each becomes a private-use character that
occurs nowhere else. So the control tokens found in the chat template's output are always its own. Text
between those is unmasked and encoded by the tokenizer without control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.messages import Message, Part, extras_of, texts_of
from vtx.runtime.prompt.tokenizer import encode, without_control_tokens

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class Masking:
    """Masks messages, and encodes the text rendered from them; safe for many threads.

    `control` holds the ids of the control tokens by their text, `literals` every character that a template may print.
    """

    def __init__(self, tokenizer: Tokenizer, control: Mapping[str, int], unk_token: str | None, literals: str) -> None:
        self._tokenizer, self._control = tokenizer, control
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
            role, content = self._mask_text(message["role"], masks, messages), message["content"]
            extras = values(extras_of(message))
            # A special token may span two parts, so a message is masked as one text and cut again.
            text, at = self._mask_text("".join(texts_of(message)), masks, messages), 0
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
        known, elsewhere = before[start:], self._text_tokenizers[1]
        tokenizer = elsewhere if start else self._text_tokenizers[0]
        prefix, ids = encode(tokenizer, known).ids, encode(tokenizer, known + text).ids
        return list(ids[len(prefix) :] if ids[: len(prefix)] == prefix else encode(elsewhere, text).ids)

    @cached_property
    def _text_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return without_control_tokens(self._tokenizer, self._control)

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
