"""From token ids back to text, as it arrives."""

from __future__ import annotations

from collections.abc import Set

from tokenizers import Tokenizer

from vtx.runtime.prompt.tokenizer import decode


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
