"""The configuration of `vtx-watch`: sources, their standing questions, and outputs, from a TOML or JSON file."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vtx.runtime.api.options import Options, Settings
from vtx.runtime.bundle.files import read_text_file
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import Guide
from vtx.runtime.prompt.text import utf8
from vtx.runtime.strict import Strict, optional

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_CONFIG = 1 << 20
MAX_SOURCES = 256
SCHEMES = ("rtsp", "rtsps", "rtmp", "http", "https", "tcp", "udp", "srt")
KINDS = ("camera", "stream", "pipeline", "video", "folder")
MANUAL = "docs/how-to/watch.md describes the file"
_STRICT = Strict(RequestError, MANUAL)
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class When:
    """Ask about a frame if the answer of another question to it equals or contains a text, whatever its case."""

    question: str
    equals: str | None = optional(None)
    contains: str | None = optional(None)

    def __post_init__(self) -> None:
        if (self.equals is None) == (self.contains is None):
            raise RequestError(f"when {self.question!r:.70}: give equals or contains, one of them; {MANUAL}")

    def matches(self, text: str) -> bool:
        """True if an answer is as this says."""
        answer = text.strip().casefold()
        if self.equals is not None:
            return answer == self.equals.strip().casefold()
        return (self.contains or "").casefold() in answer


@dataclass(frozen=True, slots=True)
class StandingQuestion:
    """A question that is asked again and again about the newest frame of a source.

    It is asked about every frame that can be answered in time, or with `every` after these seconds, with `changed` once
    the picture differs by this much from the one asked about last, or with `when`. `report`: every answer is an event,
    or only those that differ from the one before.
    """

    name: str
    ask: str
    every: float | None = optional(None)
    changed: float | None = optional(None)
    when: When | None = optional(None)
    choices: tuple[str, ...] | None = optional(None)
    schema: dict[str, Any] | None = optional(None)
    regex: str | None = optional(None)
    max_new_tokens: int = optional(64)
    thinking: bool | None = optional(None)
    max_thinking_tokens: int | None = optional(None)
    timeout: float = optional(60.0)
    k: int | str = optional("default")
    reduce: str = optional("default")
    rest: str | int | float | None = optional(None)
    report: Literal["all", "changes"] = optional("all")

    def __post_init__(self) -> None:
        if not self.ask.strip():
            raise RequestError(f"question {self.name!r:.70} asks nothing; write its text in ask")
        _between("every", self.every, 0, 1e6)
        _between("changed", self.changed, 0, 1)
        if self.when is not None and (self.every is not None or self.changed is not None):
            raise RequestError(
                f"question {self.name!r:.70} has when and another schedule; it is asked after "
                f"{self.when.question!r:.70}, so leave every and changed out"
            )
        _ = self.settings  # checks them

    @property
    def settings(self) -> Settings:
        """K, reductions and options of its answers. Raises RequestError."""
        forms = (self.schema, self.choices, self.regex)
        guide = Guide(*forms) if any(form is not None for form in forms) else None
        k = None if self.k == "none" else self.k
        options = Options(
            self.max_new_tokens,
            timeout=self.timeout,
            guide=guide,
            rest=self.rest,
            thinking=self.thinking,
            max_thinking_tokens=self.max_thinking_tokens,
        )
        return Settings(k, options, self.reduce)


@dataclass(frozen=True, slots=True)
class ReferencePart:
    """Text, an image or both that stand before each frame, e.g. to compare with; the text comes first."""

    text: str | None = optional(None)
    image: str | None = optional(None)

    def __post_init__(self) -> None:
        if self.image is None and not (self.text or "").strip():
            raise RequestError(f"a reference has neither text nor image; give one, or both; {MANUAL}")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One of `camera`, `stream`, `pipeline`, `video` and `folder`, where frames come from, and what is asked of them.

    `image_tokens`: the most of a frame. `rate`: the most frames a second that are looked at. `speed`: how many times as
    fast as its own rate a video runs.
    `reference`: what stands before each frame; `prefix_file` keeps what the caches hold of it. `reuse` of the last
    answer: for frames that are equal once preprocessed, or also for those that differ by at most `near`, or whose image
    tokens have `moved` by at most that.
    `silent_after`: seconds without a frame after which a camera, stream or pipeline is reported.
    """

    name: str
    question: tuple[StandingQuestion, ...]
    camera: str | None = optional(None)
    stream: str | None = optional(None)
    pipeline: str | None = optional(None)
    video: str | None = optional(None)
    folder: str | None = optional(None)
    size: str | None = optional(None)
    image_tokens: int | None = optional(None)
    rate: float | None = optional(None)
    speed: float = optional(1.0)
    system: str | None = optional(None)
    reference: tuple[ReferencePart, ...] = optional(())
    prefix_file: str | None = optional(None)
    reuse: Literal["none", "equal", "near", "embedding"] = optional("equal")
    near: float | None = optional(None)
    moved: float | None = optional(None)
    silent_after: float = optional(10.0)

    def __post_init__(self) -> None:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        where = f"source {self.name!r:.70}"
        if len(kinds) != 1:
            raise RequestError(f"{where} has {' and '.join(kinds) or 'no source'}; give one of {', '.join(KINDS)}")
        if self.stream is not None and self.stream.partition("://")[0].lower() not in SCHEMES:
            raise RequestError(f"{where}: stream must begin with one of {', '.join(f'{s}://' for s in SCHEMES)}")
        if self.size is not None and (self.camera is None or not re.fullmatch(r"\d{1,5}x\d{1,5}", self.size)):
            raise RequestError(f"{where}: size is that of a camera, e.g. 1280x720; leave it out or correct it")
        _between("rate", self.rate, 0.001, 1000)
        _between("speed", self.speed, 0.1, 1000)
        _between("near", self.near, 0, 1)
        _between("moved", self.moved, 0, 2)
        _between("silent_after", self.silent_after, 0.1, 1e6)
        for reuse, threshold, example in (("near", "near", 0.05), ("embedding", "moved", 0.1)):
            if (self.reuse == reuse) != (getattr(self, threshold) is not None):
                raise RequestError(
                    f'{where}: reuse = "{reuse}" and the threshold {threshold}, e.g. {example}, go together; give both'
                )
        if self.prefix_file is not None and self.system is None and not self.reference:
            raise RequestError(f"{where} has a prefix_file, and no system or reference to keep in it; leave it out")
        self._check_order(where)

    def _check_order(self, where: str) -> None:
        """Refuse questions that wait for none of this source, or for each other."""
        names = [question.name for question in self.question]
        _unique(f"{where}: questions", names)
        for question in self.question:
            at = question
            path = [question.name]
            while at.when is not None:
                if at.when.question not in names or at.when.question in path:
                    raise RequestError(
                        f"{where}: {at.name!r:.70} waits for {at.when.question!r:.70}, which must be another "
                        "question of this source that does not wait for it"
                    )
                path.append(at.when.question)
                at = self.question[names.index(at.when.question)]

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


@dataclass(frozen=True, slots=True)
class FileOutput:
    """A file of events; at `max_mb` (10^6 bytes) it is renamed to NAME.1, of which `keep` are kept."""

    path: str
    max_mb: float = optional(100.0)
    keep: int = optional(5)

    def __post_init__(self) -> None:
        _between("max_mb", self.max_mb, 0.001, 1e6)
        _between("keep", self.keep, 0, 1000)


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL that gets each event by POST; `timeout` in seconds, `queue` events wait at most."""

    url: str
    timeout: float = optional(5.0)
    queue: int = optional(1000)
    headers: dict[str, str] = optional(None)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s:@]+(:\d{1,5})?(/\S*)?", self.url):
            raise RequestError("a webhook's url must be http://HOST[:PORT]/PATH or https, without a user or a space")
        _between("timeout", self.timeout, 0.1, 600)
        _between("queue", self.queue, 1, 1_000_000)


@dataclass(frozen=True, slots=True)
class Mqtt:
    """A broker that gets each event at `topic`; `queue` events wait at most."""

    host: str
    topic: str
    port: int = optional(1883)
    tls: bool = optional(False)
    user: str | None = optional(None)
    password: str | None = optional(None)
    queue: int = optional(1000)

    def __post_init__(self) -> None:
        _between("port", self.port, 1, 65535)
        _between("queue", self.queue, 1, 65535)
        if not self.topic or any(char in self.topic for char in "#+\0"):
            raise RequestError(f"the topic {self.topic!r:.70} must be a name without + and #; {MANUAL}")


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """All of it. Events are lines of stdout unless another output is given. `status`: seconds between two of these."""

    source: tuple[SourceConfig, ...]
    file: FileOutput | None = optional(None)
    webhook: tuple[Webhook, ...] = optional(())
    mqtt: Mqtt | None = optional(None)
    status: float = optional(60.0)

    def __post_init__(self) -> None:
        if not 1 <= len(self.source) <= MAX_SOURCES:
            raise RequestError(f"there are {len(self.source)} sources; give 1 to {MAX_SOURCES}")
        _unique("sources", [source.name for source in self.source])
        _between("status", self.status, 0.1, 1e6)

    @property
    def outputs(self) -> tuple[FileOutput | None, tuple[Webhook, ...], Mqtt | None]:
        return self.file, self.webhook, self.mqtt


def read_config(path: Path) -> WatchConfig:
    """The configuration in a TOML or JSON file; its relative paths start at its folder. Raises RequestError."""
    text = utf8(read_text_file(path, MAX_CONFIG), path.name, RequestError)
    try:
        data = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{path.name} is not {'JSON' if path.suffix == '.json' else 'TOML'} ({e}); {MANUAL}") from e
    config = _STRICT.read(WatchConfig, data, path.name)

    def absolute(given: str) -> str:
        return str(path.parent.resolve() / Path(given).expanduser())

    sources = [
        replace(
            source,
            video=source.video and absolute(source.video),
            folder=source.folder and absolute(source.folder),
            prefix_file=source.prefix_file and absolute(source.prefix_file),
            reference=tuple(replace(part, image=part.image and absolute(part.image)) for part in source.reference),
        )
        for source in config.source
    ]
    file = config.file and replace(config.file, path=absolute(config.file.path))
    return replace(config, source=tuple(sources), file=file)


def _unique(what: str, names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise RequestError(f"{what}: the name {name!r:.70} must be 1 to 64 letters, digits, dots, - and _")
        if names.count(name) > 1:
            raise RequestError(f"{what}: {name!r} is there twice; rename one")
    if not names:
        raise RequestError(f"{what}: there are none; {MANUAL}")


def _between(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise RequestError(f"{name} is {value:g}; it must be a number from {least:g} to {most:g}")
