"""The lines of a batch: questions, most of them about images, from an untrusted JSONL file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.files import read_text_file
from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.server.limits import Limits
from vtx.runtime.session.sampling import Sampling
from vtx.tools.data.items import MAX_FILE, MAX_LINE, Item, named_files, parse_line

OWN = (  # settings that a line may have
    "system", "k", "reduce", "about", "schema", "choices", "regex", "grammar", "max_new_tokens", "ignore_eos", "stop",
    "gate_threshold", "rest", "logprobs", "top_logprobs",
    *(setting.name for setting in fields(Sampling) if setting.name != "logit_bias"),
)  # fmt: skip
FIELDS = ("question", "image", "video", "id", *OWN)
OPENAI = {"custom_id", "method", "url", "body"}  # of a line of OpenAI's batch file
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
UNUSED = ("answer",)  # the right answer, in files that vtx-calibrate reads too


@dataclass(frozen=True, slots=True)
class Task:
    """One line, its number counted from 1: a question about images and videos; `id` is the line's own.

    `own` holds those of the line's settings, `OWN`, that it has. `request`: the body of a line of OpenAI's batch file,
    for `url`, which has all of these; `id` is then its `custom_id`.
    """

    number: int
    id: Any
    images: tuple[Path, ...]
    question: str
    videos: tuple[Path, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)
    request: bytes | None = None
    url: str = ""

    @property
    def is_openai(self) -> bool:
        """True for a line of OpenAI's batch file."""
        return self.request is not None

    @property
    def key(self) -> str:
        """Changes with the question and with the files it is about; the number alone where one of them is missing."""
        if self.request is not None:
            return f"{self.number} {hashlib.sha256(self.request).hexdigest()}"
        try:
            return f"{self.number} {Item((*self.images, *self.videos), self.question).digest()}"
        except ImageError:
            return str(self.number)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that asks nothing, and why; `id` as a task's. `is_openai`: it is one of OpenAI's batch file."""

    number: int
    reason: str
    id: Any = None
    is_openai: bool = False

    @property
    def key(self) -> str:
        """The line's number."""
        return str(self.number)


@dataclass(frozen=True, slots=True)
class Tasks:
    """All lines of a file in their order, empty ones left out, and the sha256 of its content."""

    lines: tuple[Task | BadLine, ...]
    digest: str


def read_tasks(file: Path, folder: Path | None) -> Tasks:
    """The lines of a file; images lie inside `folder`, by default the file's directory.

    Raises RequestError if there is no such file or directory, it is too large, or holds no line.
    """
    raw = read_text_file(file, MAX_FILE)
    images = (file.parent if folder is None else folder.expanduser()).resolve()
    if not images.is_dir():
        raise RequestError(f"the image path {images} is not a directory; give one with --images")
    lines = list[Task | BadLine]()
    numbers = dict[str, int]()  # of the lines, by custom_id
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        record: Any = None
        try:
            record = parse_line(line, Limits().body if b'"custom_id"' in line else MAX_LINE)
            lines.append(_task(number, record, images))
        except RequestError as e:
            fields = record if isinstance(record, dict) else {}
            lines.append(BadLine(number, str(e), fields.get("custom_id", fields.get("id")), "custom_id" in fields))
        name = record.get("custom_id") if isinstance(record, dict) else None
        if isinstance(name, str) and numbers.setdefault(name, number) != number:
            raise RequestError(
                f"lines {numbers[name]} and {number} of {file.name} have the same custom_id {shown(name)}; answers are "
                "told apart by it: rename one"
            )
    if not lines:
        raise RequestError(
            f'{file.name} is empty; write a line for each question: {{"image": "a.jpg", "question": "..."}}'
        )
    return Tasks(tuple(lines), hashlib.sha256(raw).hexdigest())


def _task(number: int, record: Any, images: Path) -> Task:
    if not isinstance(record, dict):
        raise RequestError(f"a JSON {type(record).__name__} is not an object with image and question")
    if "custom_id" in record:
        name = record["custom_id"]
        body = record.get("body")
        if not isinstance(name, str) or not isinstance(body, dict) or set(record) - OPENAI:
            raise RequestError(f"a line with custom_id has {', '.join(sorted(OPENAI))} and nothing else")
        url = record.get("url")
        if record.get("method") != "POST" or url not in URLS:
            raise RequestError(f"its method must be POST and its url {', '.join(URLS)}")
        return Task(number, name, (), "", request=json.dumps(body).encode(), url=url)
    unknown = sorted(set(record) - {*FIELDS, *UNUSED})
    if unknown:
        raise RequestError(f"it has the unknown field {shown(unknown[0])}; a line may have {', '.join(FIELDS)}")
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise RequestError("it has no question")
    pictures, videos = (named_files(record, kind, images) for kind in ("image", "video"))
    settings = {name: record[name] for name in OWN if name in record}
    return Task(number, record.get("id"), pictures, question, videos, settings)
