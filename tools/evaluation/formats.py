"""The files of benchmarks as published, and plain questions and answers.

They are untrusted: sizes are bounded, images are inside one directory, only the bad record is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.files import read_text_file
from vtx.runtime.bundle.safetensors import parse_json, shown
from vtx.runtime.errors import RequestError
from vtx.tools.data.items import MAX_FILE, inside, named_files, parse_line
from vtx.tools.evaluation.questions import Format, QuestionFiles, Record, TaskQuestion, is_file

MAX_CHOICES = 26
MAX_ANSWERS = 64
MIN_ANSWERS = 4  # of annotators; with fewer no answer would score 1
SHORT = "Answer the question using a single word or phrase."
UNANSWERABLE = f"When the provided information is insufficient, respond with 'Unanswerable'.\n{SHORT}"
LETTER = "Answer with the option's letter from the given choices directly."
IMAGE_ENDINGS = (".jpg", ".png", ".jpeg")


def _lines(source: QuestionFiles) -> Iterator[Record]:
    """The lines of a JSONL file, unparsed."""
    raw = read_text_file(source.data, MAX_FILE)
    return ((f"line {n}", line) for n, line in enumerate(raw.split(b"\n"), 1) if line.strip())


def _object(path: Path) -> dict[str, Any]:
    value = parse_json(read_text_file(path, MAX_FILE), path.name, error=RequestError)
    if not isinstance(value, dict):
        raise RequestError(f"{path.name} holds a JSON {type(value).__name__}, not an object")
    return value


def _list(holder: dict[str, Any], key: str, path: Path) -> list[Any]:
    value = holder.get(key)
    if not isinstance(value, list):
        raise RequestError(f"{path.name} has no list {key!r}; it is not a file of this benchmark")
    return value


def _fields(record: Any) -> dict[str, Any]:
    record = parse_line(record) if isinstance(record, bytes) else record
    if not isinstance(record, dict):
        raise RequestError(f"a JSON {type(record).__name__} is not an object")
    return record


def _text(record: dict[str, Any], key: str, *, strip: bool = True) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"it has no {key}")
    return value.strip() if strip else value


def _texts(value: Any, least: int, most: int, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not least <= len(value) <= most or not all(isinstance(v, str) for v in value):
        raise RequestError(f"its {what} are not a list of {least} to {most} texts")
    return tuple(value)


def _yes_or_no(value: str) -> tuple[str]:
    answer = value.strip().rstrip(".").lower()
    if answer not in ("yes", "no"):
        raise RequestError(f"its answer is {shown(value)}, neither yes nor no")
    return (answer,)


def _pope(record: Any, source: QuestionFiles) -> TaskQuestion:
    """{"question_id", "image", "text", "label"}, a line each."""
    fields = _fields(record)
    name = _text(fields, "image")
    return TaskQuestion(
        (inside(source.images, name),),
        _text(fields, "text"),
        _yes_or_no(_text(fields, "label")),
        name,
        str(fields.get("category", "")),
    )


def _exact(record: Any, source: QuestionFiles) -> TaskQuestion:
    """{"image": name or list, "video": the same, "question", "answer"}, a line each; images as for vtx-calibrate."""
    fields = _fields(record)
    images, videos = (named_files(fields, kind, source.images) for kind in ("image", "video"))
    question = _text(fields, "question")
    about = "\0".join(str(path) for path in (*images, *videos))
    return TaskQuestion(images, question, (_text(fields, "answer"),), about or question, videos=videos)


def _mme_lines(source: QuestionFiles) -> Iterator[Record]:
    """(category, stem of the image, line) of every text file in every category's directory."""
    if not source.data.is_dir():
        raise RequestError(f"{source.data} is not a directory; give MME's, which has one per category")
    for category in sorted(path for path in source.data.iterdir() if path.is_dir()):
        answers = category / "questions_answers_YN"
        for file in sorted((answers if answers.is_dir() else category).glob("*.txt")):
            content = read_text_file(file, MAX_FILE).decode("utf-8", "replace")
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield f"{category.name}/{file.name}, line {number}", (category.name, file.stem, line)


def _mme(record: tuple[str, str, str], source: QuestionFiles) -> TaskQuestion:
    category, stem, line = record
    question, tab, answer = line.rpartition("\t")
    if not tab:
        raise RequestError("no tab separates question and answer")
    folders = [f"{category}/images", category]
    names = [f"{folder}/{stem}{ending}" for folder in folders for ending in IMAGE_ENDINGS]
    paths = [inside(source.images, name) for name in names]
    picture = next((path for path in paths if is_file(path)), None)
    if picture is None:
        raise RequestError(f"no image {shown(stem)} in {category}")
    return TaskQuestion((picture,), question.strip(), _yes_or_no(answer), f"{category}/{stem}", category)


def _science_problems(source: QuestionFiles) -> Iterator[Record]:
    """The problems of one split of problems.json, or of the directory that holds it."""
    path = source.data / "problems.json" if source.data.is_dir() else source.data
    for number, problem in _object(path).items():
        if isinstance(problem, dict) and problem.get("split") == source.split:
            yield f"problem {number}", {**problem, "number": number}


def _science(record: dict[str, Any], source: QuestionFiles) -> TaskQuestion:
    name = record.get("image")
    number = record["number"]
    paths = (inside(source.images, f"{source.split}/{number}/{name}"),) if isinstance(name, str) and name else ()
    return _multiple_choice(record, paths, number, str(record.get("subject", "")))


def _multiple_choice(record: dict[str, Any], paths: tuple[Path, ...], image: str, group: str) -> TaskQuestion:
    """{"hint", "question", "choices", "answer"}: the index of a choice, or its letter."""
    choices = _texts(record.get("choices"), 2, MAX_CHOICES, "choices")
    right = record.get("answer")
    letters = [letter(n) for n in range(len(choices))]
    index = letters.index(right) if isinstance(right, str) and right in letters else right
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        raise RequestError(f"its answer is {right!r:.40}, not the index or letter of one of {len(choices)} choices")
    hint = record.get("hint")
    options = [f"{name}. {choice}" for name, choice in zip(letters, choices, strict=True)]
    context = [f"Context: {hint}"] if isinstance(hint, str) and hint else []
    text = "\n".join([*context, _text(record, "question", strip=False), *options])
    return TaskQuestion(paths, text, (letters[index],), image, group, len(choices))


def _choices(record: Any, source: QuestionFiles) -> TaskQuestion:
    """{"image" or "video": name or list, "question", "choices", "answer", "hint", "category"}, a line each."""
    fields = _fields(record)
    images, videos = (named_files(fields, kind, source.images) for kind in ("image", "video"))
    about = "\0".join(map(str, (*images, *videos))) or _text(fields, "question")
    return replace(_multiple_choice(fields, images, about, str(fields.get("category", ""))), videos=videos)


def _seed(record: Any, source: QuestionFiles) -> TaskQuestion:
    fields = _fields(record)
    name = _text(fields, "data_id")
    choices = [fields.get(f"choice_{which}") for which in "abcd"]
    return _multiple_choice(
        {**fields, "choices": choices, "hint": ""},
        (inside(source.images, name),),
        name,
        str(fields["question_type_id"]),
    )


def _gqa_records(source: QuestionFiles) -> Iterator[Record]:
    return ((f"question {number}", fields) for number, fields in _object(source.data).items())


def _gqa(record: Any, source: QuestionFiles) -> TaskQuestion:
    fields = _fields(record)
    name = f"{_text(fields, 'imageId')}.jpg"
    question = _text(fields, "question", strip=False)
    return TaskQuestion((inside(source.images, name),), question, (_text(fields, "answer"),), name)


def _viz_wiz_records(source: QuestionFiles) -> Iterator[Record]:
    value = parse_json(read_text_file(source.data, MAX_FILE), source.data.name, error=RequestError)
    if not isinstance(value, list):
        raise RequestError(f"{source.data.name} holds a JSON {type(value).__name__}, not a list")
    return ((f"question {number}", fields) for number, fields in enumerate(value, 1))


def _viz_wiz(record: Any, source: QuestionFiles) -> TaskQuestion:
    fields = _fields(record)
    name = _text(fields, "image")
    question = _text(fields, "question", strip=False)
    humans = _humans(fields.get("answers"))
    return TaskQuestion((inside(source.images, name),), question, humans, name, str(fields.get("answer_type", "")))


def letter(index: int) -> str:
    """A, B, C ... of a choice."""
    return chr(ord("A") + index)


def _vqa_records(source: QuestionFiles) -> Iterator[Record]:
    """Each question with its annotation, from the two files of a release."""
    if source.annotations is None:
        raise RequestError("VQAv2's answers are in a separate file; give it with --annotations")
    release = _object(source.data)
    answered = _object(source.annotations)
    notes = {
        note["question_id"]: note
        for note in _list(answered, "annotations", source.annotations)
        if isinstance(note, dict) and isinstance(note.get("question_id"), int)
    }
    subtype = str(release.get("data_subtype", ""))
    for number, question in enumerate(_list(release, "questions", source.data), 1):
        valid = isinstance(question, dict) and isinstance(question.get("question_id"), int)
        note = notes.get(question["question_id"]) if valid else None
        yield f"question {number}", {"question": question, "annotation": note, "subtype": subtype}


def _vqa(record: dict[str, Any], source: QuestionFiles) -> TaskQuestion:
    question = record["question"]
    note = record["annotation"]
    if note is None:
        raise RequestError("it has no annotation")
    fields = _fields(question)
    number = fields.get("image_id")
    if not isinstance(number, int) or not 0 <= number < 10**12:
        raise RequestError("its image_id is not a number of at most 12 digits")
    name = f"COCO_{record['subtype']}_{number:012d}.jpg"
    path = inside(source.images, name)
    kind = str(note.get("answer_type", ""))
    return TaskQuestion((path,), _text(fields, "question", strip=False), _humans(note.get("answers")), name, kind)


def _humans(answers: Any) -> tuple[str, ...]:
    """The answers of annotators, as texts or as objects."""
    texts = [a.get("answer") if isinstance(a, dict) else a for a in answers] if isinstance(answers, list) else None
    return _texts(texts, MIN_ANSWERS, MAX_ANSWERS, "answers")


def _text_vqa(record: Any, source: QuestionFiles) -> TaskQuestion:
    fields = _fields(record)
    name = f"{_text(fields, 'image_id')}.jpg"
    answers = _texts(fields.get("answers"), MIN_ANSWERS, MAX_ANSWERS, "answers")
    return TaskQuestion((inside(source.images, name),), _text(fields, "question", strip=False), answers, name)


def _listed(key: str) -> Callable[[QuestionFiles], Iterator[Record]]:
    """The records of the list `key` of a JSON file."""
    return lambda at: ((f"question {n}", r) for n, r in enumerate(_list(_object(at.data), key, at.data), 1))


FORMATS: dict[str, Format] = {
    "pope": Format(_lines, _pope, SHORT),
    "mme": Format(_mme_lines, _mme),
    "scienceqa": Format(_science_problems, _science, LETTER),
    "vqav2": Format(_vqa_records, _vqa, SHORT),
    "textvqa": Format(_listed("data"), _text_vqa, SHORT),
    "gqa": Format(_gqa_records, _gqa, SHORT),
    "vizwiz": Format(_viz_wiz_records, _viz_wiz, UNANSWERABLE),
    "seedbench": Format(_listed("questions"), _seed, LETTER),
    "choices": Format(_lines, _choices, LETTER),
    "exact": Format(_lines, _exact),
}
LMMS_EVAL = {  # where a task of lmms-eval puts its questions in another way
    "mme": Format(_mme_lines, _mme, SHORT, lambda text: text.replace(" Please answer yes or no.", "")),
    "scienceqa": Format(_science_problems, _science, LETTER, needs_image=True),  # scienceqa_img
    "textvqa": Format(_listed("data"), _text_vqa, SHORT, str.capitalize),
    "vizwiz": Format(_viz_wiz_records, _viz_wiz, UNANSWERABLE, str.capitalize),
}
