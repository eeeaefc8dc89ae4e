"""The machine of a measurement: its description, its load, and the memory of this process."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from vtx.runtime.host.machine import version

PACKAGES = ("vtx-edge", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "numpy", "tokenizers", "pillow")
QUIET = 0.5  # load average above which figures are doubtful
INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "VNNI", "amx_tile": "AMX", "asimd": "NEON"}
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def describe() -> dict[str, Any]:
    """Processor, cores, load average, Python and the versions that are installed, ready for JSON."""
    model, flags = _processor()
    kinds = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    return {
        "cpu": f"{os.cpu_count()} cores, {model} ({', '.join(kinds) or 'no vector instructions known'})",
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: number for name in PACKAGES if (number := version(name))},
    }


def in_words(machine: dict[str, Any]) -> str:
    """`describe` on one line, with a warning where something else was computing."""
    load = machine["load_before"]
    busy = f" THE MACHINE IS NOT QUIET (load {load})." if load is not None and load > QUIET else ""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['cpu']}; {machine['system']}, Python {machine['python']}, {versions}.{busy}"


def _processor() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), set()
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.machine(), set(flags[1].split()) if flags else set()


def resident() -> int | None:
    """Bytes of memory that this process holds now, or None where the system does not say."""
    return _status("VmRSS")


def peak() -> int | None:
    """The most bytes of memory that this process has held since `forget_peak`, or since its start.

    Unlike getrusage's figure it is reset for a new process.
    """
    return _status("VmHWM")


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
