"""Cores and memory that this process may use, and the versions of installed packages."""

from __future__ import annotations

import os
from pathlib import Path

from vtx.runtime.units import size


def version(package: str) -> str | None:
    from importlib import metadata  # which takes longer to import than all else here

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes of memory that a new program could take, or None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(table["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in table else None


def memory_in_words() -> str:
    """The memory that is free, and the limit of this process if it has one, for messages about too little of it."""
    free = available_memory()
    parts = [] if free is None else [f"{size(free)} free"]
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except ImportError:  # not on Windows
        return ", ".join(parts)
    parts += [f"limit of this process {size(limit)}"] if limit != resource.RLIM_INFINITY else []
    return ", ".join(parts) or "free memory unknown"


def cpu_flags() -> frozenset[str]:
    """The instruction sets that every core has, as Linux names them; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(set.intersection(*cores)) if cores else frozenset()
