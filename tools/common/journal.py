"""Journals: files of JSON objects, one a line, that are appended to as work proceeds and read when it resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import RequestError

MAX_JOURNAL = 1 << 30  # bytes


def as_line(value: Mapping[str, Any]) -> bytes:
    """An object as a line of a journal."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def read_lines(content: bytes, name: str) -> Iterator[dict[str, Any]]:
    """The objects of the journal `name`; a last line without its end is incomplete and left out.

    Raises RequestError for a line that is not a JSON object.
    """
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        value = parse_json(line, f"line {number} of {name}", error=RequestError)
        if not isinstance(value, dict):
            raise RequestError(f"line {number} of {name} is a JSON {type(value).__name__}, not an object")
        yield value
