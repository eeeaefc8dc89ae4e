"""The memory that a machine has for a new program."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtx.runtime.host import machine

MEMINFO = """MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:    4000000 kB
SwapFree:        8000000 kB
"""


def test_available_memory_is_neither_all_nor_only_what_is_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "meminfo")
    assert machine.available_memory() == 4_000_000 * 1024
    (tmp_path / "meminfo").unlink()
    assert machine.available_memory() is None
