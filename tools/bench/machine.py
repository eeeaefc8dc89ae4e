"""The machine of a measurement: its description and its load."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.host.machine import version

PACKAGES = (
    "vtx-edge",
    *(engine.package for engine in ENGINES.values()),
    "numpy",
    "tokenizers",
    "pillow",
)
QUIET = 0.5  # load average above which figures are doubtful
INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "VNNI", "amx_tile": "AMX", "asimd": "NEON"}


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor with its cores, load average, Python, system, and the versions that are installed."""

    cpu: str
    load_before: float | None
    python: str
    system: str
    versions: Mapping[str, str]

    def in_words(self) -> str:
        """One line, with a warning if the machine was busy."""
        load = self.load_before
        busy = f" THE MACHINE IS NOT QUIET (load {load})." if load is not None and load > QUIET else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.cpu}; {self.system}, Python {self.python}, {versions}.{busy}"


def describe() -> Machine:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    model = named[1] if named else (platform.machine() if text else platform.processor() or platform.machine())
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    kinds = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    return Machine(
        cpu=f"{os.cpu_count()} cores, {model} ({', '.join(kinds) or 'no vector instructions known'})",
        load_before=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={name: number for name in PACKAGES if (number := version(name))},
    )
