"""The journal of an export: its finished parts, kept in its staging directory so that the same command can resume.

Of each rewritten file it has a line per tensor with the CRC-32 of the tensor's bytes, since a machine that went down
may have lost what a line records; a finished file was synced first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.spec.manifest import FileRecord

JOURNAL = ".journal"
PROBE = ".probe"  # the file of the speed trials


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor written to its file: the first byte after it, and the CRC-32 of its bytes, scales included."""

    tensor: str
    end: int
    crc: int


class ExportJournal:
    """The finished parts of one export, read from `folder` and appended to as the work proceeds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self.files: dict[str, FileRecord] = {}
        self.tensors: dict[str, list[Written]] = {}
        self.golden = False
        self.factors = False
        for line in list(_lines(self._path))[1:]:
            self._read_line(line)

    @property
    def has_work(self) -> bool:
        return bool(self.files or self.tensors or self.factors)

    def add_file(self, name: str, record: FileRecord) -> None:
        self.files[name] = record
        _append(self._path, {"file": name, **asdict(record)})

    def add_tensor(self, file: str, written: Written) -> None:
        _append(self._path, {"of": file, **asdict(written)})

    def add_golden(self) -> None:
        self.golden = True
        _append(self._path, {"golden": True})

    def add_factors(self) -> None:
        self.factors = True
        _append(self._path, {"factors": True})

    def remove(self) -> None:
        """Remove the files that do not belong to the bundle."""
        for path in (self._path, self._path.with_name(PROBE)):
            path.unlink(missing_ok=True)

    def _read_line(self, line: dict[str, Any]) -> None:
        if "file" in line:
            self.files[line["file"]] = FileRecord(line["bytes"], line["sha256"])
        elif "of" in line:
            written = Written(line["tensor"], line["end"], line["crc"])
            self.tensors.setdefault(line["of"], []).append(written)
        elif "golden" in line:
            self.golden = True
        elif "factors" in line:
            self.factors = True


def begin(folder: Path, key: str) -> None:
    """Start the journal of the export with that key in its empty staging directory."""
    _append(folder / JOURNAL, {"key": key})


def key_in(folder: Path) -> str | None:
    """The key of the export that left a journal in `folder`."""
    key = next(_lines(folder / JOURNAL), {}).get("key")
    return key if isinstance(key, str) else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The journal's lines up to the first incomplete one."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            value = json.loads(line)
            if not isinstance(value, dict):
                return
            yield value


def _append(path: Path, value: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")
