"""Prompt lookup: drafts of the next tokens, copied from the last place in prompt and answer with the same n-gram.

Drafts are verified by the session in one pass, which reads the weights once. Each wrong token of a draft costs its
computation, so drafts grow while they are accepted and shrink while they are not.
"""

from __future__ import annotations

from collections.abc import Iterable

SIZES = (3, 2)  # tokens of the n-grams, the longer first
FIRST = 2  # tokens of the first draft


class PromptLookup:
    """Drafts for one answer, of at most `most` tokens, the first of `first`; `ids` are the prompt's, images left out.

    `drafted` counts the tokens of all drafts, `accepted` the ones that became part of the answer.
    """

    def __init__(self, ids: Iterable[int], most: int, first: int = FIRST) -> None:
        self._most = most
        self._length = min(first, most)
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the index of the token after each n-gram's last place
        self.drafted = self.accepted = 0
        self._running: int | None = None  # tokens of the last draft that were not accepted so far
        for token in ids:
            self.push(token)

    def push(self, token: int) -> bool:
        """One more token of the prompt or the answer; any may follow it."""
        for size in SIZES:
            if len(self._ids) >= size:
                self._after[tuple(self._ids[-size:])] = len(self._ids)
        self._ids.append(token)
        return False

    def accept(self) -> None:
        """The token last pushed is the draft's next one."""
        assert self._running, "no draft is running"
        self.accepted += 1
        self._running -= 1

    def draft(self, most: int) -> list[int]:
        """The tokens that followed the last ones at their previous place, at most `most`; empty without such a place.

        A repetition may be shorter than a draft: it is assumed to go on.
        """
        if self._running is not None:  # twice as long after a draft that was accepted to its end, else half as long
            self._length = max(1, self._length // 2) if self._running else min(2 * self._length, self._most)
        self._running = None
        first = next((at for size in SIZES if (at := self._after.get(tuple(self._ids[-size:])))), None)
        if first is None:
            return []
        period = len(self._ids) - first
        tokens = [self._ids[first + n % period] for n in range(min(self._length, most))]
        self.drafted += len(tokens)
        self._running = len(tokens) or None
        return tokens
