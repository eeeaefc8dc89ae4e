"""Questions about images to calibrate and train on: a JSONL file, LLaVA's conversations, or drawn scenes.

A data file is untrusted: its size is bounded, and its images lie inside one directory. Items that cannot be used are
skipped and reported; when they exceed `MAX_SKIPPED` of all items, nothing is measured.
"""

from __future__ import annotations

import codecs
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vtx.runtime.bundle.files import read_text_file
from vtx.runtime.bundle.safetensors import parse_json, shown
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.vision.image import ImageSource, image_size, load_image
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.tokens import PromptImage

SCENES = "scenes"
SCENES_SEED = 7_000_000_001  # training draws from small seeds
MAX_FILE = 256 << 20
MAX_LIST_FILE = 128 << 20  # a JSON list is parsed as a whole and takes many times its size
MAX_LINE = 1 << 20
MAX_IMAGES = 64
MAX_SKIPPED = 0.2
_MARKER = "<image>"


@dataclass(frozen=True, slots=True)
class Item:
    """One question about images, and the right answer if it is known."""

    images: tuple[ImageSource, ...]
    question: str
    answer: str | None = None

    def digest(self) -> str:
        """A sha256 that changes with the texts, and with the content, or size and time, of the images."""
        digest = hashlib.sha256(repr((self.question, self.answer)).encode("utf-8", "surrogatepass"))
        for image in self.images:
            if isinstance(image, Image.Image):
                digest.update(repr(image.size).encode() + image.tobytes())
            elif isinstance(image, Path):
                try:
                    status = image.stat()
                except OSError as e:
                    raise ImageError(
                        f"image {image} was removed after it was first read ({e.strerror}); restore it"
                    ) from e
                digest.update(f"{image}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Data:
    """Usable items, and one line for each item that is not."""

    source: str
    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_skipped(self.source, len(self.items), self.skipped, "items")
        if not self.items:
            raise RequestError(f"{self.source} is empty; give at least one question about an image")


def check_skipped(
    source: str, used: int, skipped: Sequence[str], noun: str, fix: str = ", or give the image directory with --images"
) -> None:
    total = used + len(skipped)
    if skipped and (not used or len(skipped) > MAX_SKIPPED * total):
        raise RequestError(
            f"{len(skipped)} of {total} {noun} of {source} cannot be used, the limit is {MAX_SKIPPED:.0%}; "
            f"fix the data{fix}. First: {skipped[0]}"
        )


def read_data(source: str, images: Path | None, samples: int, seed: int = 0) -> Data:
    """At most `samples` items, sampled by `seed` and kept in order, of a file, a directory with one, or "scenes".

    A JSONL file has lines {"image": name or list, "question", "answer"?}; LLaVA's format is a list of {"image",
    "conversations"}, of which the first question and answer count. Names are relative to `images`, by default the
    file's directory. Every image is decoded once here, so that a bad one stops the work before it starts. Raises
    RequestError if the source is missing or empty, or too many of its items cannot be used.
    """
    if samples < 1:
        raise RequestError(f"--samples is {samples}; it must be at least 1")
    if source == SCENES:
        return Data("the drawn scenes", scene_items(samples))
    file = _data_file(Path(source).expanduser())
    folder = (file.parent if images is None else images.expanduser()).resolve()
    if not folder.is_dir():
        raise RequestError(f"the image path {folder} is not a directory; give one with --images")
    items = list[Item]()
    skipped = list[str]()
    records = _records(file)
    if len(records) > samples:
        records = [records[n] for n in sorted(random.Random(seed).sample(range(len(records)), samples))]
    for label, record in records:
        try:
            items.append(_item(record if not isinstance(record, bytes) else parse_line(record), folder))
        except (RequestError, ImageError) as e:
            skipped.append(f"{label}: {e}")
    return Data(file.name, tuple(items), tuple(skipped))


def _data_file(path: Path) -> Path:
    """The file itself, or the only one of a directory. Raises RequestError."""
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if file.suffix == ".jsonl")
    if len(files) != 1:
        raise RequestError(f"{path} holds {len(files)} .jsonl files, and there must be one; name the file itself")
    return files[0]


def _records(file: Path) -> list[tuple[str, Any]]:
    """The lines (bytes) or the items of a JSON list of a file, by their labels in messages. Raises RequestError."""
    raw = read_text_file(file, MAX_FILE)
    if raw.lstrip()[:1] != b"[":
        return [(f"line {n}", line) for n, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if len(raw) > MAX_LIST_FILE:
        raise RequestError(f"{file.name} holds {len(raw):,} bytes of JSON, the limit is {MAX_LIST_FILE:,}; split it")
    return [(f"item {n}", item) for n, item in enumerate(parse_json(raw, file.name, error=RequestError), 1)]


def image_key(image: ImageSource) -> object:
    """A key that equal images share while their items are in memory."""
    return id(image) if isinstance(image, Image.Image) else image


def scene_items(count: int, questions: int = 1) -> tuple[Item, ...]:
    """`count` drawn scenes with some different questions each: always the same, never trained on by the demo model."""
    from vtx.tools.data.scene_questions import ask_some
    from vtx.tools.data.scenes import photograph, random_scene

    rng = random.Random(SCENES_SEED)
    items = list[Item]()
    for _ in range(count):
        scene = random_scene(rng)
        answers = {question.question: question.answer for question in ask_some(scene, 4 * questions - 3, rng)}
        images = (photograph(scene, rng),)
        items += [Item(images, *question) for question in list(answers.items())[:questions]]
    return tuple(items)


def prompt_images(layout: Layout, item: Item) -> list[PromptImage]:
    layout = layout.for_images(len(item.images))
    return [layout.prompt_image(*image_size(image)) for image in item.images]


def image_tokens(layout: Layout, item: Item) -> int:
    layout = layout.for_images(len(item.images))
    return sum(layout.count(*image_size(image)) for image in item.images)


def plain(answer: str) -> str:
    """An answer normalised for comparison: case, spaces and the final full stop are ignored."""
    return " ".join(answer.casefold().split()).rstrip(" .!")


def parse_line(raw: bytes, most: int = MAX_LINE) -> Any:
    """The value of a line of a JSONL file, of at most `most` bytes. Raises RequestError.

    It may begin with a byte order mark, as in the middle of a file that was put together from others.
    """
    if len(raw) > most:
        raise RequestError(f"the line has {len(raw):,} bytes, the limit is {most:,}")
    return parse_json(raw.removeprefix(codecs.BOM_UTF8), "the line", error=RequestError)


def _item(record: Any, folder: Path) -> Item:
    """Raises RequestError or ImageError for a record that cannot be used."""
    if not isinstance(record, dict):
        raise RequestError(f"a JSON {type(record).__name__} is not an object with image and question")
    if record.get("video") is not None:
        raise RequestError("it names a video, and models are measured on images; give frames of it as images")
    paths = named_files(record, "image", folder)
    if not paths:
        raise RequestError("it names no image")
    question = record.get("question")
    answer = record.get("answer")
    turns = record.get("conversations")
    if turns is not None:  # the first two turns of a conversation
        by_role: dict[str, str] = {}
        for turn in turns if isinstance(turns, list) else ():
            role, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
            if isinstance(role, str) and isinstance(text, str):
                text = text.replace(f"{_MARKER}\n", "").replace(f"\n{_MARKER}", "").replace(_MARKER, "")
                by_role.setdefault(role, text)
        question = by_role.get("human")
        answer = by_role.get("gpt")
    if not isinstance(question, str) or not question.strip():
        raise RequestError("it has no question")
    answer = answer.strip() if isinstance(answer, str) else None
    for path in paths:
        load_image(path)
    return Item(paths, question.strip(), answer or None)


def named_files(record: Mapping[str, Any], kind: str, folder: Path) -> tuple[Path, ...]:
    """The files inside `folder` that a record names under its `kind`, "image" or "video". Raises RequestError."""
    names = record.get(kind, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise RequestError(f"its {kind} must be a file name, or a list of them")
    if len(names) > MAX_IMAGES:
        raise RequestError(f"it names {len(names)} {kind}s, the limit is {MAX_IMAGES}")
    return tuple(inside(folder, name) for name in names)


def inside(folder: Path, name: str) -> Path:
    """The path of `name`, which must be inside a resolved `folder`. Raises RequestError."""
    try:
        path = (folder / name).resolve()
        if path.is_relative_to(folder):
            return path
    except (OSError, ValueError, RuntimeError) as e:
        raise RequestError(f"image {shown(name)} is not a file name") from e
    raise RequestError(f"image {shown(name)} lies outside {folder}")


def split_items(
    items: Sequence[Item], learn: int, held_out: int, seed: int, *, shuffle: bool
) -> tuple[list[Item], list[Item]]:
    """About `learn` items to train on and `held_out` that share no image with them; each in order.

    If there are fewer items than requested, both shrink in proportion. Raises `RequestError` if one is empty.
    """
    count = min(held_out, round(len(items) * held_out / (learn + held_out)))
    by_image: dict[object, list[int]] = {}
    for number, item in enumerate(items):
        by_image.setdefault(image_key(item.images[0]), []).append(number)
    groups = list(by_image.values())
    if shuffle:
        random.Random(seed).shuffle(groups)
    excluded = set[int]()
    for group in groups:
        if len(excluded) < count:
            excluded.update(group)
    rest = [item for number, item in enumerate(items) if number not in excluded]
    if not rest or not excluded:
        raise RequestError(
            f"{len(items)} items about {len(groups)} images leave {len(rest)} to train on and {len(excluded)} to hold "
            "out, and each must be at least 1; give more images"
        )
    return rest, [items[number] for number in sorted(excluded)]
