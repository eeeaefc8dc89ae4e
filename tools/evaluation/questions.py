"""Questions of a benchmark with their right answers, from local files that nobody vouches for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vtx.runtime.errors import ImageError, RequestError
from vtx.tools.data.items import MAX_SKIPPED, Item

Record = tuple[str, Any]  # where it stands, for messages; what stands there


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """One question as it is put to the model, and its right answers.

    `image` names what it is about: questions about one image or video are resampled together. `group` is the
    benchmark's own category; `choices` the number of options of a multiple choice.
    """

    images: tuple[Path, ...]
    text: str
    answers: tuple[str, ...]
    image: str
    group: str = ""
    choices: int = 0
    videos: tuple[Path, ...] = ()

    def digest(self) -> str:
        """Changes with the text and with the images' files. Raises ImageError for a file that has been removed."""
        return Item((*self.images, *self.videos), self.text).digest()


@dataclass(frozen=True, slots=True)
class Where:
    """Where a benchmark's files lie: its questions, the annotations where they are apart, the directory of images."""

    data: Path
    images: Path
    annotations: Path | None = None
    split: str = "test"


@dataclass(frozen=True, slots=True)
class Format:
    """How a benchmark's files are read: records, and the question of one of them."""

    records: Callable[[Where], Iterable[Record]]
    question: Callable[[Any, Where], TaskQuestion]
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Usable questions, and one line for each record that is not."""

    source: str
    questions: tuple[TaskQuestion, ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_skipped(self.source, len(self.questions), self.skipped)


def check_skipped(source: str, used: int, skipped: Sequence[str]) -> None:
    """Raise RequestError where too few questions are left to judge by."""
    total = used + len(skipped)
    if not total:
        raise RequestError(f"{source} is empty; give at least one question")
    if skipped and (not used or len(skipped) > MAX_SKIPPED * total):
        raise RequestError(
            f"{len(skipped)} of {total} questions of {source} cannot be used, the limit is {MAX_SKIPPED:.0%}; fix the "
            f"data, or give the image directory with --images. First: {skipped[0]}"
        )


def read_questions(
    form: Format, where: Where, *, instruction: str | None = None, samples: int | None = None, seed: int = 0
) -> QuestionSet:
    """The questions of a benchmark, each with an instruction on a line of its own: the format's when None is given.

    At most `samples` of them, all about the same image or none, drawn by `seed`.

    Raises:
        RequestError: the files are missing or empty, or too many of their questions cannot be used.

    """
    if samples is not None and samples < 1:
        raise RequestError(f"--samples is {samples}; it must be at least 1")
    if not where.images.is_dir():
        raise RequestError(f"the image path {where.images} is not a directory; give one with --images")
    instruction = form.instruction if instruction is None else instruction
    questions, skipped = list[TaskQuestion](), list[str]()
    for label, record in form.records(where):
        try:
            questions.append(_instructed(form.question(record, where), instruction))
        except (RequestError, ImageError) as e:
            skipped.append(f"{label}: {e}")
    drawn = questions if samples is None else _drawn(questions, samples, seed)
    return QuestionSet(where.data.name, tuple(drawn), tuple(skipped))


def _instructed(question: TaskQuestion, instruction: str) -> TaskQuestion:
    if not question.text.strip():
        raise RequestError("it has no question")
    for path in (*question.images, *question.videos):
        if not is_there(path):
            raise ImageError(f"the file {path.name} is not in {path.parent}")
    return replace(question, text=f"{question.text}\n{instruction}") if instruction else question


def is_there(path: Path) -> bool:
    """Whether a path, whose name may be no name at all, is a file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _drawn(questions: Sequence[TaskQuestion], samples: int, seed: int) -> list[TaskQuestion]:
    """Questions of randomly drawn images, in their order, as long as they fit into `samples`."""
    by_image: dict[str, int] = {}
    for question in questions:
        by_image[question.image] = by_image.get(question.image, 0) + 1
    images, kept, room = list(by_image), set[str](), samples
    random.Random(seed).shuffle(images)
    for image in images:
        if by_image[image] <= room:
            kept.add(image)
            room -= by_image[image]
    if not kept:
        raise RequestError(f"--samples is {samples}, but every image has more questions; raise it")
    return [question for question in questions if question.image in kept]
