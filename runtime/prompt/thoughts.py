"""Thoughts before an answer: the marks around them, and the text of an answer as it comes, divided at these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """The texts that begin and end a thought."""

    begin: str
    end: str


# Qwen3.5's and MiniCPM-V's, then Gemma 4's.
FORMS = (ThoughtForm("<think>", "</think>"), ThoughtForm("<|channel>thought\n", "<channel|>"))


def thought_form(template: str) -> ThoughtForm | None:
    """The form whose end mark stands in the source of a chat template; None: the model has no thoughts."""
    return next((form for form in FORMS if form.end in template), None)


def undecided(text: str, marks: Sequence[str]) -> int:
    """The most characters at the end of a text with which one of these marks may begin."""
    longest = max(map(len, marks), default=1) - 1
    counts = range(min(longest, len(text)), 0, -1)
    return next((count for count in counts if any(mark.startswith(text[-count:]) for mark in marks)), 0)


class ThoughtDivider:
    """An answer's text as it comes, divided into `thought`, None without one, and what follows it.

    A piece that may belong to a mark waits until that is known. `special`: marks that are special tokens, which are no
    text elsewhere. `inside`: in a thought now; `may_begin`: not known yet.
    """

    def __init__(self, form: ThoughtForm, special: Sequence[str], *, inside: bool) -> None:
        self._form = form
        self._special = special
        self._waiting = ""
        self.inside = inside
        self.may_begin = not inside
        self.thought = "" if inside else None

    def push(self, text: str, *, last: bool = False) -> str:
        """The text of the answer that is certain with this piece; `last`: none follows."""
        text = self._waiting + text
        self._waiting = ""
        if self.may_begin:
            start = text.lstrip()
            if not start.startswith(self._form.begin) and not last and self._form.begin.startswith(start):
                self._waiting = text
                return ""
            self.may_begin = False
            self.inside = start.startswith(self._form.begin)
            if self.inside:
                self.thought = ""
                text = start.removeprefix(self._form.begin)
            for mark in () if self.inside else self._special:
                text = text.replace(mark, "")
        return self._divided(text, last=last) if self.inside else text

    def _divided(self, text: str, *, last: bool) -> str:
        """The part of a text in a thought that is behind it."""
        assert self.thought is not None
        part, mark, behind = text.partition(self._form.end)
        certain = part if mark or last else part[: len(part) - undecided(part, [self._form.end])]
        certain = certain.rstrip()  # blanks at its end are not the thought's
        self._waiting = "" if mark or last else part[len(certain) :]
        self.thought += certain if self.thought else certain.lstrip()
        self.inside = not mark
        return behind


class ThoughtLimit:
    """The end mark of a thought, `end_ids`, in place of its tokens after `most`; None: they have no limit."""

    def __init__(self, divider: ThoughtDivider, end_ids: Sequence[int], most: int | None) -> None:
        self._divider = divider
        self._end_ids = end_ids
        self._most = most
        self._forced = 0  # ids of the end mark so far

    def next_token(self, count: int) -> int | None:
        """The token that must follow `count` tokens of the answer; None: any may."""
        if self._most is None or not self._divider.inside or count < self._most or self._forced == len(self._end_ids):
            return None
        self._forced += 1
        return self._end_ids[self._forced - 1]
