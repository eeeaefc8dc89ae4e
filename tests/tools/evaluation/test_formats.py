"""Benchmarks' files: what is read of them, and what bad records cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.json_files import write_json
from tests.support.tiny import random_image

from vtx.runtime.errors import RequestError
from vtx.tools.evaluation.formats import FORMATS
from vtx.tools.evaluation.questions import QuestionFiles, QuestionSet, read_questions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.jpg", "COCO_val2014_000000000007.jpg", "0a1b.jpg"):
        random_image(1).save(tmp_path / name)
    return tmp_path


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def read(task: str, data: Path, images: Path, **more: Any) -> QuestionSet:
    source = QuestionFiles(data, images.resolve(), more.pop("annotations", None))
    return read_questions(FORMATS[task], source, **more)


POPE = {"question_id": 1, "image": "a.jpg", "text": "Is there a dog in the image?", "label": "yes"}


def test_pope_s_lines(folder: Path) -> None:
    [question] = read("pope", lines(folder / "pope.json", POPE), folder).questions
    assert question.text == "Is there a dog in the image?\nAnswer the question using a single word or phrase."
    assert (question.images, question.answers) == ((folder.resolve() / "a.jpg",), ("yes",))


def test_an_instruction_of_one_s_own_or_none(folder: Path) -> None:
    data = lines(folder / "pope.json", POPE)
    texts = [read("pope", data, folder, instruction=text).questions[0].text for text in ("Be brief.", "")]
    assert texts == [f"{POPE['text']}\nBe brief.", POPE["text"]]


def test_choices_about_videos(folder: Path) -> None:
    (folder / "clip.mp4").write_bytes(b"read when it is asked about")
    line = {"video": "clip.mp4", "question": "What falls?", "choices": ["a cup", "a book"], "answer": "B"}
    [question] = read("choices", lines(folder / "mme.jsonl", line), folder).questions
    assert (question.images, question.videos) == ((), (folder.resolve() / "clip.mp4",))
    assert (question.answers, question.image) == (("B",), str(folder.resolve() / "clip.mp4"))
    with pytest.raises(RequestError, match=r"none\.mp4 is not in"):
        read("choices", lines(folder / "mme.jsonl", {**line, "video": "none.mp4"}), folder)


BAD: list[tuple[Any, str]] = [
    ("{", "not sound JSON"),
    ({**POPE, "image": "../../etc/passwd"}, "lies outside"),
    ({**POPE, "image": "/etc/passwd"}, "lies outside"),
    ({**POPE, "image": "missing.jpg"}, "is not in"),
    ({**POPE, "image": "x" * 5000}, "is not in"),
    ({**POPE, "image": "a\0b.jpg"}, "not a file name"),
    ({**POPE, "label": "maybe"}, "neither yes nor no"),
    ({**POPE, "text": 5}, "no text"),
    ([POPE], "is not an object"),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_bad_line_is_named_and_left_out(folder: Path, record: Any, reason: str) -> None:
    read_set = read("pope", lines(folder / "pope.json", *[POPE] * 5, record), folder)
    assert len(read_set.questions) == 5
    [told] = read_set.skipped
    assert told.startswith("line 6: ")
    assert reason in told


def test_too_many_bad_lines_leave_nothing_to_judge_by(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"2 of 3 questions .* the limit is 20%"):
        read("pope", lines(folder / "pope.json", POPE, "{", "{"), folder)


def test_a_link_out_of_the_directory_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "images").mkdir()
    (folder / "images" / "out.jpg").symlink_to(folder / "a.jpg")
    with pytest.raises(RequestError, match="lies outside"):
        read("pope", lines(folder / "pope.json", {**POPE, "image": "out.jpg"}), folder / "images")


@pytest.mark.parametrize("apart", [False, True])
def test_mme_s_directories(tmp_path: Path, apart: bool) -> None:
    """Pictures and texts of a category in one directory, or in two, as the release has both."""
    color = tmp_path / "color"
    images, texts = (color / "images", color / "questions_answers_YN") if apart else (color, color)
    images.mkdir(parents=True)
    texts.mkdir(exist_ok=True)
    random_image(1).save(images / "0001.png")
    (texts / "0001.txt").write_text("Is it red? Please answer yes or no.\tYes\nIs it blue?\tNo\n")
    found = read("mme", tmp_path, tmp_path).questions
    assert [(q.text, q.answers, q.group, q.image) for q in found] == [
        ("Is it red? Please answer yes or no.", ("yes",), "color", "color/0001"),
        ("Is it blue?", ("no",), "color", "color/0001"),
    ]


def test_scienceqa_s_problems(tmp_path: Path) -> None:
    (tmp_path / "test" / "3").mkdir(parents=True)
    random_image(1).save(tmp_path / "test" / "3" / "image.png")
    problem = {"question": "Which?", "choices": ["one", "two"], "answer": 1, "hint": "Look.", "split": "test"}
    problems = {
        "3": {**problem, "image": "image.png", "subject": "natural science"},
        "4": {**problem, "image": None, "hint": ""},
        "5": {**problem, "split": "train"},
    }
    write_json(tmp_path / "problems.json", problems)
    first, second = read("scienceqa", tmp_path, tmp_path, instruction="").questions
    assert first.text == "Context: Look.\nWhich?\nA. one\nB. two"
    assert (first.answers, first.choices, first.group, len(first.images)) == (("B",), 2, "natural science", 1)
    assert (second.text, second.images) == ("Which?\nA. one\nB. two", ())


def test_vqav2_s_questions_beside_their_annotations(folder: Path) -> None:
    ids = {"image_id": 7, "question_id": 7001}
    humans = [{"answer": "red", "answer_id": n} for n in range(10)]
    questions = {"data_subtype": "val2014", "questions": [{**ids, "question": "What color?"}]}
    annotations = {"annotations": [{**ids, "answers": humans, "answer_type": "other"}]}
    data, answers = folder / "q.json", folder / "a.json"
    write_json(data, questions)
    write_json(answers, annotations)
    [question] = read("vqav2", data, folder, annotations=answers).questions
    assert (question.images[0].name, question.answers, question.group) == (
        "COCO_val2014_000000000007.jpg", ("red",) * 10, "other",
    )  # fmt: skip
    with pytest.raises(RequestError, match="--annotations"):
        read("vqav2", data, folder)


def test_textvqa_s_data_and_its_annotators(folder: Path) -> None:
    record = {"image_id": "0a1b", "question": "What brand?", "answers": ["nokia"] * 10}
    data = folder / "text.json"
    write_json(data, {"data": [*[record] * 4, {**record, "answers": ["nokia"]}]})
    found = read("textvqa", data, folder)
    assert found.questions[0].answers == ("nokia",) * 10
    assert found.skipped == ("question 5: its answers are not a list of 4 to 64 texts",)


def test_a_sample_has_all_questions_about_an_image_or_none(tmp_path: Path) -> None:
    names = [f"{n}.jpg" for n in range(10)]
    for name in names:
        random_image(1).save(tmp_path / name)
    data = lines(tmp_path / "pope.json", *[{**POPE, "image": name} for name in names for _ in range(3)])
    drawn = read("pope", data, tmp_path, samples=7).questions
    assert len(drawn) == 6
    assert len({question.image for question in drawn}) == 2
    assert drawn == read("pope", data, tmp_path, samples=7).questions
    assert drawn != read("pope", data, tmp_path, samples=7, seed=1).questions
