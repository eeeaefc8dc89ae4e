"""The lines of a batch: questions, most of them about images, from a JSONL file that nobody vouches for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.exporter.data.items import MAX_FILE, named_files, parse_line
from vtx.runtime.bundle.files import read_named
from vtx.runtime.errors import RequestError


@dataclass(frozen=True, slots=True)
class Task:
    """One line, its number counted from 1: a question about images and videos; `id` is the line's own."""

    number: int
    id: Any
    images: tuple[Path, ...]
    question: str
    videos: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that asks nothing, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tasks:
    """All lines of a file in their order, empty ones left out, and the sha256 of its content."""

    lines: tuple[Task | BadLine, ...]
    digest: str


def read_tasks(file: Path, folder: Path | None) -> Tasks:
    """The lines of a file; images lie inside `folder`, by default the file's directory.

    Raises:
        RequestError: there is no such file or directory, it is too large, or holds no line.

    """
    raw = read_named(file, MAX_FILE, error=RequestError)
    images = (file.parent if folder is None else folder.expanduser()).resolve()
    if not images.is_dir():
        raise RequestError(f"the image path {images} is not a directory; give one with --images")
    lines = [_read(number, line, images) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(
            f'{file.name} is empty; write a line for each question: {{"image": "a.jpg", "question": "..."}}'
        )
    return Tasks(tuple(lines), hashlib.sha256(raw).hexdigest())


def _read(number: int, line: bytes, images: Path) -> Task | BadLine:
    try:
        return _task(number, parse_line(line), images)
    except RequestError as e:
        return BadLine(number, str(e))


def _task(number: int, record: Any, images: Path) -> Task:
    if not isinstance(record, dict):
        raise RequestError(f"a JSON {type(record).__name__} is not an object with image and question")
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise RequestError("it has no question")
    pictures, videos = (named_files(record, kind, images) for kind in ("image", "video"))
    return Task(number, record.get("id"), pictures, question, videos)
