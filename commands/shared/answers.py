"""An answer printed while it comes, its thought beside it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from vtx.runtime.terminal.console import note, say

if TYPE_CHECKING:
    from vtx.runtime.api.stream import AnswerStream


def print_answer(stream: AnswerStream, before: str = "") -> None:
    """Print an answer as it comes, and its thought on stderr.

    `before` is noted with the first piece, so that an error is shown alone. Raises VtxError.
    """
    thought = ""
    for piece in stream:
        if before:
            note(before)
            before = ""
        if stream.thought and not thought:
            thought = stream.thought
            note(f"thought: {thought}")
        say(piece, line=False)
        sys.stdout.flush()
    click.echo()
    if stream.answer.thought and not thought:
        note(f"thought: {stream.answer.thought}")
