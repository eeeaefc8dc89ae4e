"""The memory of this process, in bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Bytes of memory that this process holds now, or None if unknown."""
    return _status("VmRSS")


def peak() -> int | None:
    """The most bytes of memory that this process has held since `forget_peak`, or since its start; None if unknown.

    Pages of mapped files count, e.g. of libraries. getrusage's figure, the fallback, also counts on Linux what the
    process that started this one held.
    """
    if (high_water := _status("VmHWM")) is not None:
        return high_water
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def forget_peak() -> None:
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
