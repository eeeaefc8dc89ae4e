"""The journal of an export: its finished parts, kept in its staging directory so that the same command can resume.

A rewritten file has a line per tensor with the CRC-32 of the tensor's bytes, since a machine that crashed may have lost
the bytes that a line records; a finished file was synced first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vtx.runtime.bundle.spec.manifest import FileRecord
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.strict import Strict, json_value
from vtx.tools.data.journal import MAX_JOURNAL, as_line, read_lines

JOURNAL = ".journal"


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first line: the key of the export that the journal belongs to."""

    key: str


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished file."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor written to the file `of`: the first byte after it, and the CRC-32 of its bytes, scales included."""

    of: str
    tensor: str
    end: int
    crc: int


@dataclass(frozen=True, slots=True)
class _OtherPart:
    """A finished part of another kind: golden vectors or factors."""

    part: str


Line = _Begun | _Finished | Written | _OtherPart
LINES: Mapping[str, type[Line]] = {"key": _Begun, "file": _Finished, "of": Written, "part": _OtherPart}


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
                case _Finished(name, size, digest):
                    self.files[name] = FileRecord(size, digest)
                case Written(of=file):
                    self.tensors.setdefault(file, []).append(line)
                case _OtherPart(part):
                    self.parts.add(part)

    @property
    def has_work(self) -> bool:
        return bool(self.files or self.tensors or self.parts)

    def add_file(self, name: str, record: FileRecord) -> None:
        self.files[name] = record
        _append(self._path, _Finished(name, record.bytes, record.sha256))

    def add_tensor(self, written: Written) -> None:
        _append(self._path, written)

    def add_part(self, part: str) -> None:
        self.parts.add(part)
        _append(self._path, _OtherPart(part))

    def remove(self) -> None:
        """Remove the journal, which does not belong to the bundle."""
        self._path.unlink(missing_ok=True)


def begin(folder: Path, key: str) -> None:
    """Start the journal of the export with that key in its empty staging directory."""
    _append(folder / JOURNAL, _Begun(key))


def key_in(folder: Path) -> str | None:
    """The key of the export that left a journal in `folder`."""
    first = next(_lines(folder / JOURNAL), None)
    return first.key if isinstance(first, _Begun) else None


def _lines(path: Path) -> Iterator[Line]:
    """The journal's lines up to the first incomplete or damaged one."""
    strict = Strict(RequestError, "begin the export anew")
    with suppress(OSError, VtxError):
        with path.open("rb") as file:
            content = file.read(MAX_JOURNAL)
        for line in read_lines(content, path.name):
            kind = next((LINES[name] for name in LINES if name in line), _Begun)
            yield strict.read(kind, line, path.name)


def _append(path: Path, line: Line) -> None:
    with path.open("ab") as file:
        file.write(as_line(json_value(line)))
