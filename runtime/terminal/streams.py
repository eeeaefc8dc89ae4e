"""The standard streams of a command: none is missing, and none fails on a character that it cannot represent."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress


def prepare_streams() -> None:
    """Open missing streams, and let stdout escape characters that its encoding lacks.

    A missing one has a closed descriptor (`2>&-`, services, pythonw), which the next file to be opened would get, and
    libraries would write their messages into that file. stderr then goes nowhere; writing to stdout is an error.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # the lowest that is free: this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if hasattr(sys.stdout, "reconfigure"):
        codecs.register_error("vtx-escape", _escaped)
        sys.stdout.reconfigure(errors="vtx-escape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""The characters as \uXXXX, two of them beyond U+FFFF: in JSON they are the same characters."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = [units[at : at + 2].hex() for at in range(0, len(units), 2)]
    return "".join(f"\\u{pair}" for pair in pairs), error.end


def drop_stdout() -> None:
    """Send what stdout's buffer still holds nowhere, so that the process does not try to write it at its end."""
    with suppress(OSError, ValueError):  # a stream without a descriptor, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
