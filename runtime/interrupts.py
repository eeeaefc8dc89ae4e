"""Ctrl-C in a command: one line and exit code 130, at any moment."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # typing's import takes longer than all of this module
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

INTERRUPTED = 130


def leave_at_interrupt() -> None:
    """End the process at once at an interrupt from now on: no work is under way that would be undone.

    A process that was started to ignore interrupts keeps ignoring them.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def _leave(signum: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    """End without exceptions, which half imported libraries would swallow or log."""
    os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode(errors="replace"))
    os._exit(INTERRUPTED)


class Interruptible:
    """A context in which interrupts are KeyboardInterrupts, so that work is undone; for `leave_at_interrupt`.

    Python drops one that arrives in a callback of the garbage collector; here it ends the process nevertheless.
    """

    def __enter__(self) -> None:
        self._switched = signal.getsignal(signal.SIGINT) is _leave
        if self._switched:
            self._hook = sys.unraisablehook
            sys.unraisablehook = self._unraisable
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._switched:
            leave_at_interrupt()
            sys.unraisablehook = self._hook

    def _unraisable(self, dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            _leave()
        self._hook(dropped)
