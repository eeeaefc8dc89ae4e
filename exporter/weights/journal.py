"""The journal of an export: its finished parts, kept in its staging directory so that the same command can resume.

A rewritten file has a line per tensor with the CRC-32 of the tensor's bytes, since a machine that crashed may have lost
the bytes that a line records; a finished file was synced first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.spec.manifest import FileRecord
from vtx.runtime.errors import VtxError
from vtx.tools.data.journal import MAX_JOURNAL, as_line, read_lines

JOURNAL = ".journal"


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor written to the file `of`: the first byte after it, and the CRC-32 of its bytes, scales included."""

    of: str
    tensor: str
    end: int
    crc: int


class ExportJournal:
    """The finished parts of one export, read from `folder` and appended to as the work proceeds.

    All after a damaged line counts as unfinished.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self.files: dict[str, FileRecord] = {}
        self.tensors: dict[str, list[Written]] = {}
        self.parts: set[str] = set()
        for line in _lines(self._path):
            match line:
                case {"file": str(name), "bytes": int(size), "sha256": str(digest)}:
                    self.files[name] = FileRecord(size, digest)
                case {"of": str(file), "tensor": str(tensor), "end": int(end), "crc": int(crc)}:
                    self.tensors.setdefault(file, []).append(Written(file, tensor, end, crc))
                case {"part": str(part)}:  # golden vectors or factors
                    self.parts.add(part)
                case {"key": str()}:  # of the export that the journal belongs to
                    pass
                case _:
                    break

    @property
    def has_work(self) -> bool:
        return bool(self.files or self.tensors or self.parts)

    def add_file(self, name: str, record: FileRecord) -> None:
        self.files[name] = record
        _append(self._path, {"file": name, **asdict(record)})

    def add_tensor(self, written: Written) -> None:
        _append(self._path, asdict(written))

    def add_part(self, part: str) -> None:
        self.parts.add(part)
        _append(self._path, {"part": part})

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def begin(folder: Path, key: str) -> None:
    """Start the journal of the export with that key in its empty staging directory."""
    _append(folder / JOURNAL, {"key": key})


def key_in(folder: Path) -> str | None:
    key = next(_lines(folder / JOURNAL), {}).get("key")
    return key if isinstance(key, str) else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The journal's lines up to the first that is incomplete or no JSON."""
    with suppress(OSError, VtxError):
        with path.open("rb") as file:
            content = file.read(MAX_JOURNAL)
        yield from read_lines(content, path.name)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(as_line(line))
