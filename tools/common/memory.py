"""The memory of this process, in bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Bytes of memory that this process holds now, or None where the system does not say."""
    return _status("VmRSS")


def peak() -> int | None:
    """The most bytes of memory that this process has held since `forget_peak`, or since its start; None if unknown.

    Pages of mapped files count, such as those of libraries. getrusage's figure, taken where there is no other, counts
    on Linux also what the process that started this one held.
    """
    return _status("VmHWM") or _usage()


def forget_peak() -> None:
    """Reset `peak`. Where the system cannot, it keeps counting from the start of the process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def _status(name: str) -> int | None:
    try:
        field = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(field[1]) * 1024 if field else None


def _usage() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
