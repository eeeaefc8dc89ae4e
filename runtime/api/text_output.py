"""The text of an answer as it is shown: no leading space, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from vtx.runtime.prompt.detokenizer import Detokenizer


class TextOutput:
    """Tokens in, pieces of text out. A piece that may begin a stop string waits until that is settled.

    The answer ends at the first character with which a stop string is complete, and is cut where that string begins;
    token boundaries play no part.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = detokenizer, tuple(stops)
        self._waiting = ""
        self._shown: list[str] = []
        self._begun = False
        self.stopped = False

    @property
    def text(self) -> str:
        """What has been shown."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """The text that is certain with one more token, maybe none."""
        return self._show(self._detokenizer.push(token), last=False)

    def finish(self) -> str:
        """The rest."""
        return self._show(self._detokenizer.finish(), last=True)

    def _show(self, piece: str, *, last: bool) -> str:
        piece = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(piece)
        text = self._waiting + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            cut = min(ends)[1]
        else:
            cut = len(text) if last else len(text) - self._beginning_of_a_stop(text)
        self._waiting = "" if self.stopped else text[cut:]
        if cut:
            self._shown.append(text[:cut])
        return text[:cut]

    def _beginning_of_a_stop(self, text: str) -> int:
        """Characters at the end of `text` with which some stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
