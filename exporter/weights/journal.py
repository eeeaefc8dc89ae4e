"""The journal of an export: its finished parts, kept in its staging directory so that the same command can resume.

Of each rewritten file it has a line per tensor with the CRC-32 of the tensor's bytes, since a machine that went down
may have lost what a line records; a finished file was synced first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.spec.manifest import FileRecord
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.strict import Strict, json_value
from vtx.tools.common.journal import MAX_JOURNAL, as_line, read_lines

JOURNAL = ".journal"


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor written to its file: the first byte after it, and the CRC-32 of its bytes, scales included."""

    tensor: str
    end: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first line: the key of the export that the journal belongs to."""

    key: str


@dataclass(frozen=True, slots=True)
class _FileLine:
    """A finished file."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _TensorLine:
    """A tensor written to the file `of`."""

    of: str
    tensor: str
    end: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Golden:
    golden: bool


@dataclass(frozen=True, slots=True)
class _FactorsLine:
    factors: bool


LINES: dict[str, type] = {
    "key": _Begun,
    "file": _FileLine,
    "of": _TensorLine,
    "golden": _Golden,
    "factors": _FactorsLine,
}
STRICT = Strict(RequestError, "begin the export anew")


class ExportJournal:
    """The finished parts of one export, read from `folder` and appended to as the work proceeds.

    What stands behind a damaged line counts as unfinished.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self.files: dict[str, FileRecord] = {}
        self.tensors: dict[str, list[Written]] = {}
        self.golden = False
        self.factors = False
        for entry in _entries(self._path):
            self._take(entry)

    @property
    def has_work(self) -> bool:
        return bool(self.files or self.tensors or self.factors)

    def add_file(self, name: str, record: FileRecord) -> None:
        self.files[name] = record
        _append(self._path, _FileLine(name, record.bytes, record.sha256))

    def add_tensor(self, file: str, written: Written) -> None:
        _append(self._path, _TensorLine(file, written.tensor, written.end, written.crc))

    def add_golden(self) -> None:
        self.golden = True
        _append(self._path, _Golden(golden=True))

    def add_factors(self) -> None:
        self.factors = True
        _append(self._path, _FactorsLine(factors=True))

    def remove(self) -> None:
        """Remove the journal, which does not belong to the bundle."""
        self._path.unlink(missing_ok=True)

    def _take(self, entry: Any) -> None:
        match entry:
            case _FileLine(name, size, digest):
                self.files[name] = FileRecord(size, digest)
            case _TensorLine(file, tensor, end, crc):
                self.tensors.setdefault(file, []).append(Written(tensor, end, crc))
            case _Golden():
                self.golden = True
            case _FactorsLine():
                self.factors = True


def begin(folder: Path, key: str) -> None:
    """Start the journal of the export with that key in its empty staging directory."""
    _append(folder / JOURNAL, _Begun(key))


def key_in(folder: Path) -> str | None:
    """The key of the export that left a journal in `folder`."""
    first = next(_entries(folder / JOURNAL), None)
    return first.key if isinstance(first, _Begun) else None


def _entries(path: Path) -> Iterator[Any]:
    """The journal's lines up to the first incomplete or damaged one, each as one of `LINES`."""
    with suppress(OSError, VtxError):
        with path.open("rb") as file:
            content = file.read(MAX_JOURNAL)
        for line in read_lines(content, path.name):
            kind = next((LINES[name] for name in LINES if name in line), _Begun)
            yield STRICT.read(kind, line, path.name)


def _append(path: Path, entry: Any) -> None:
    with path.open("ab") as file:
        file.write(as_line(json_value(entry)))
