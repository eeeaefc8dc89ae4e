"""Results saved as they are measured, so that an interrupted measurement can resume."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import ExportError, RequestError
from vtx.tools.common.files import locked

MAX_JOURNAL = 1 << 30  # bytes


def as_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def read_lines(content: bytes, name: str) -> Iterator[dict[str, Any]]:
    """The objects of the journal `name`; a last line without its end is incomplete and left out."""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        value = parse_json(line, f"line {number} of {name}", error=RequestError)
        if not isinstance(value, dict):
            raise RequestError(f"line {number} of {name} is a JSON {type(value).__name__}, not an object")
        yield value


class ResultJournal:
    """A JSONL file: a line that identifies the measurement, then one line per item. `results` are keyed by item digest.

    An incomplete last line is dropped; a file of another measurement is refused, and so is a line that does not have
    its CRC-32. One process may write at a time.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._identity = json.loads(json.dumps(identity))
        self.results: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> ResultJournal:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: after a failed write, close would write again and fail
            self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        except OSError as e:
            raise ExportError(f"cannot write {self._path} ({e.strerror}); name another --out") from e
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, results: Mapping[str, dict[str, Any]]) -> None:
        """Write the results of some items; they are on disk when this returns."""
        lines = [{"item": item, **result} for item, result in results.items()]
        self._write(b"".join(as_line({**line, "crc": zlib.crc32(as_line(line))}) for line in lines))
        self.results.update(results)

    def _resume(self) -> None:
        try:
            if not locked(self._file.fileno()):
                raise RequestError(f"another process is writing {self._path}; wait for it, or name another --out")
        except OSError as e:
            raise ExportError(f"cannot lock {self._path} ({e.strerror}); name another --out") from e
        size = os.fstat(self._file.fileno()).st_size
        if size > MAX_JOURNAL:
            raise RequestError(f"{self._path} has {size:,} bytes, the limit is {MAX_JOURNAL:,}; name another --out")
        try:
            content = self._file.read()
            end = content.rfind(b"\n") + 1
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as e:
            raise ExportError(
                f"cannot resume {self._path} ({e.strerror}); check the disk, or name another --out"
            ) from e
        lines = list(read_lines(content, str(self._path)))
        if not lines:
            self._write(as_line(self._identity))
            return
        if "model" not in lines[0] or not all(map(_is_intact, lines[1:])):
            raise RequestError(f"{self._path} is damaged or is not a measurement; remove it, or name another --out")
        self.results = {line.pop("item"): line for line in lines[1:]}
        for part, value in self._identity.items():
            if lines[0].get(part) != value:
                raise RequestError(
                    f"{self._path} belongs to a measurement with another {part}; remove it, or name another --out"
                )

    def _write(self, lines: bytes) -> None:
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
            os.fsync(self._file.fileno())
        except OSError as e:
            raise ExportError(f"cannot write {self._path} ({e.strerror}); free some space and run again") from e


def _is_intact(line: dict[str, Any]) -> bool:
    """Return True if the line of an item is as it was written; its CRC-32 is removed."""
    crc = line.pop("crc", None)
    return isinstance(line.get("item"), str) and crc == zlib.crc32(as_line(line))
