"""Questions of a benchmark with their right answers, from untrusted local files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vtx.runtime.errors import ImageError, RequestError
from vtx.tools.data.items import Item, check_skipped

Record = tuple[str, Any]  # its position, for messages, and its content


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """One question as it is put to the model, and its right answers.

    `about` is its text without the instruction, by which methods that look at the question choose image tokens.
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
    about: str | None = None

    def check(self) -> None:
        """Raise RequestError for an empty question, ImageError for a missing file."""
        if not self.text.strip():
            raise RequestError("it has no question")
        for path in (*self.images, *self.videos):
            if not is_file(path):
                raise ImageError(f"the file {path.name} is not in {path.parent}")

    def digest(self) -> str:
        """Changes with the text and with the images' files. Raises ImageError for a file that has been removed."""
        return Item((*self.images, *self.videos), self.text).digest()


@dataclass(frozen=True, slots=True)
class QuestionFiles:
    """The files of a benchmark: its questions, a separate file of annotations if it has one, its image directory."""

    data: Path
    images: Path
    annotations: Path | None = None
    split: str = "test"


@dataclass(frozen=True, slots=True)
class Format:
    """The reader of a benchmark's files: their records, and the question of each record.

    `wording` gives the question as it is put; with `needs_image` questions without one are left out.
    """

    records: Callable[[QuestionFiles], Iterable[Record]]
    question: Callable[[Any, QuestionFiles], TaskQuestion]
    instruction: str = ""
    wording: Callable[[str], str] = str
    needs_image: bool = False


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Usable questions, and one line for each record that is not."""

    source: str
    questions: tuple[TaskQuestion, ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_skipped(self.source, len(self.questions), self.skipped, "questions")
        if not self.questions:
            raise RequestError(f"{self.source} is empty; give at least one question")


def read_questions(
    form: Format, source: QuestionFiles, *, instruction: str | None = None, samples: int | None = None, seed: int = 0
) -> QuestionSet:
    """The questions of a benchmark, each followed by a line with the instruction (None: the format's).

    With `samples`, that many at most, of images drawn by `seed`; an image's questions are kept together. Raises
    RequestError if the files are missing or empty, or too many of their questions cannot be used.
    """
    if samples is not None and samples < 1:
        raise RequestError(f"--samples is {samples}; it must be at least 1")
    if not source.images.is_dir():
        raise RequestError(f"the image path {source.images} is not a directory; give one with --images")
    instruction = form.instruction if instruction is None else instruction
    questions = list[TaskQuestion]()
    skipped = list[str]()
    for label, record in form.records(source):
        try:
            question = form.question(record, source)
            if form.needs_image and not question.images:
                continue
            question.check()
            wording = form.wording(question.text)
            text = f"{wording}\n{instruction}" if instruction else wording
            questions.append(replace(question, text=text, about=wording))
        except (RequestError, ImageError) as e:
            skipped.append(f"{label}: {e}")
    if samples is not None:
        questions = _drawn(questions, samples, seed)
    return QuestionSet(source.data.name, tuple(questions), tuple(skipped))


def is_file(path: Path) -> bool:
    """Return True if a path, whose name may be invalid, is a file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _drawn(questions: Sequence[TaskQuestion], samples: int, seed: int) -> list[TaskQuestion]:
    """Questions of randomly drawn images, in their order, as long as they fit into `samples`."""
    by_image: dict[str, int] = {}
    for question in questions:
        by_image[question.image] = by_image.get(question.image, 0) + 1
    images = list(by_image)
    selection = set[str]()
    room = samples
    random.Random(seed).shuffle(images)
    for image in images:
        if by_image[image] <= room:
            selection.add(image)
            room -= by_image[image]
    if not selection:
        raise RequestError(f"--samples is {samples}, but every image has more questions; raise it")
    return [question for question in questions if question.image in selection]
