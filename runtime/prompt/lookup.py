"""Prompt lookup: tokens that may come next, taken from where the last ones stood before in the prompt or the answer.

Drafts are verified by the session in one pass, which reads the weights once. A draft that is wrong costs the rows it
was long, so drafts grow while they are accepted and shrink while they are not.
"""

from __future__ import annotations

from collections.abc import Iterable

SIZES = (3, 2)  # tokens that are looked up, the longer first
FIRST = 2  # tokens of the first draft


class PromptLookup:
    """Drafts for one answer, of at most `most` tokens, the first of `first`; `ids` are the prompt's, images left out.

    `drafted` counts the tokens of all drafts, `accepted` those of them that the answer took.
    """

    def __init__(self, ids: Iterable[int], most: int, first: int = FIRST) -> None:
        self._most, self._length = most, min(first, most)
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # what follows an n-gram where it stood last: an index of `_ids`
        self.drafted = self.accepted = 0
        self._running: int | None = None  # tokens of the last draft that were not accepted so far
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """One more token of the prompt or the answer."""
        for size in SIZES:
            if len(self._ids) >= size:
                self._after[tuple(self._ids[-size:])] = len(self._ids)
        self._ids.append(token)

    def accept(self) -> None:
        """The token last pushed is the draft's next one."""
        assert self._running, "no draft is running"
        self.accepted += 1
        self._running -= 1

    def draft(self, most: int) -> list[int]:
        """What followed the last tokens where they stood before, at most `most` tokens; none where they did not.

        What has come around once is taken to come around again, so that a repetition may be shorter than a draft.
        """
        self._adapt()
        first = next((at for size in SIZES if (at := self._after.get(tuple(self._ids[-size:])))), None)
        if first is None:
            return []
        period = len(self._ids) - first
        found = [self._ids[first + n % period] for n in range(min(self._length, most))]
        self.drafted += len(found)
        self._running = len(found) or None
        return found

    def _adapt(self) -> None:
        """Twice as long after a draft that was accepted to its end, half as long after one that was not."""
        if self._running is not None:
            self._length = max(1, self._length // 2) if self._running else min(2 * self._length, self._most)
        self._running = None
