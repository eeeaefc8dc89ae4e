"""Readers of calibration data: what they take, and what they skip, count and name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.support.json_files import write_json

from vtx.runtime.errors import RequestError
from vtx.tools.data import items as data
from vtx.tools.data.items import Data, Item, read_data, scene_items


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with pictures 0.png to 9.png."""
    for number in range(10):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


def lines(folder: Path, records: list[Any], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def good(count: int) -> list[dict[str, Any]]:
    return [{"image": f"{n}.png", "question": f"what is {n}?", "answer": str(n)} for n in range(count)]


def read(source: str, images: Path | None = None, samples: int = 100) -> Data:
    return read_data(source, images, samples)


# --- formats --------------------------------------------------------------------------------------


def test_lines_become_items_in_their_order(folder: Path) -> None:
    usable = read(lines(folder, good(3)))
    assert usable.items == tuple(Item((folder / f"{n}.png",), f"what is {n}?", str(n)) for n in range(3))
    assert not usable.skipped


def test_an_item_may_have_several_images_and_no_answer(folder: Path) -> None:
    item = read(lines(folder, [{"image": ["1.png", "2.png"], "question": "which?", "other": 1}])).items[0]
    assert item == Item((folder / "1.png", folder / "2.png"), "which?", None)


@pytest.mark.parametrize("answer", ["", "  \n", None, 7])
def test_an_empty_answer_is_no_reference(folder: Path, answer: object) -> None:
    assert read(lines(folder, [{"image": "1.png", "question": "?", "answer": answer}])).items[0].answer is None


def test_images_lie_in_the_named_folder_or_beside_the_file(folder: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    source = lines(elsewhere, good(2))
    assert len(read(source, folder).items) == 2
    with pytest.raises(RequestError, match=r"2 of 2 items .*--images.*does not exist"):
        read(source)
    with pytest.raises(RequestError, match="is not a directory"):
        read(source, folder / "none")


def test_a_folder_with_one_jsonl_is_data(folder: Path) -> None:
    lines(folder, good(2))
    assert len(read(str(folder)).items) == 2
    lines(folder, good(2), "more.jsonl")
    with pytest.raises(RequestError, match=r"2 \.jsonl files"):
        read(str(folder))


def test_llava_conversations_give_their_first_question_and_answer(folder: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Yes."},
    ]
    path = folder / "llava.json"
    write_json(path, [{"id": "a", "image": "3.png", "conversations": turns}])
    assert read(str(path)).items == (Item((folder / "3.png",), "What is it?", "A cat."),)
    turns[0]["value"] = "What is it?\n<image>"
    assert read(lines(folder, [{"image": "3.png", "conversations": turns}])).items[0].question == "What is it?"


def test_samples_are_drawn_over_the_whole_file_and_by_the_seed(folder: Path) -> None:
    source = lines(folder, good(10))
    first, again, other = (read_data(source, None, 4, seed).items for seed in (0, 0, 1))
    assert first == again != other
    numbers = [int(str(item.answer)) for item in first]
    assert len(numbers) == 4
    assert numbers == sorted(numbers) != [0, 1, 2, 3]


def test_scenes_are_the_same_always_and_a_longer_list_begins_with_them() -> None:
    digests = [item.digest() for item in scene_items(5)]
    assert digests == [item.digest() for item in read_data("scenes", None, 8).items[:5]]
    assert len(set(digests)) == 5
    assert all(item.answer for item in scene_items(5))


def test_a_digest_changes_with_question_answer_and_image(folder: Path) -> None:
    item = Item((folder / "1.png",), "a", "b")
    others = [Item(item.images, "b", "b"), Item(item.images, "a", None), Item((folder / "2.png",), "a", "b")]
    before = item.digest()
    assert len({before, *(other.digest() for other in others)}) == 4
    (folder / "1.png").write_bytes((folder / "2.png").read_bytes() + b"\0")
    assert item.digest() != before


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": "none.png", "question": "?"}, "does not exist"),
        ({"image": "../1.png", "question": "?"}, "outside"),
        ({"image": "/etc/passwd", "question": "?"}, "outside"),
        ({"image": "link.png", "question": "?"}, "outside"),
        ({"image": "loop", "question": "?"}, "image"),
        ({"image": "a\0b", "question": "?"}, "is not a file name"),
        ({"image": "", "question": "?"}, "its image must be a file name"),
        ({"image": "text.png", "question": "?"}, "not an image"),
        ({"image": "1.png"}, "no question"),
        ({"image": "1.png", "question": "  "}, "no question"),
        ({"image": "1.png", "question": ["a"]}, "no question"),
        ({"image": "1.png", "conversations": 5}, "no question"),
        ({"image": "1.png", "conversations": [{"from": [], "value": "a"}, "b"]}, "no question"),
        ({"question": "?"}, "names no image"),
        ({"image": [], "question": "?"}, "names no image"),
        ({"image": [1], "question": "?"}, "its image must be a file name"),
        ({"image": ["1.png"] * 65, "question": "?"}, "65 images"),
        ([1], "is not an object"),
        ("a" * (1 << 20), "limit is 1,048,576"),
    ],
)
def test_an_unusable_item_is_skipped_and_named(folder: Path, tmp_path_factory: Any, record: Any, reason: str) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.png"
    outside.write_bytes((folder / "1.png").read_bytes())
    (folder / "link.png").symlink_to(outside)
    (folder / "loop").symlink_to("loop")
    (folder / "text.png").write_text("no picture")
    usable = read(lines(folder, [*good(5), record]))
    assert len(usable.items) == 5
    assert len(usable.skipped) == 1
    assert usable.skipped[0].startswith("line 6: ")
    assert reason in usable.skipped[0]


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe", b'{"image": "1.png", "question": "\\ud800"}', b"[" * 70 + b"]" * 70]
)
def test_a_line_that_is_no_json_is_skipped(folder: Path, line: bytes) -> None:
    path = Path(lines(folder, good(5)))
    path.write_bytes(path.read_bytes() + b"\n" + line)
    assert len(read(str(path)).skipped) == 1


def test_more_than_a_fifth_unusable_stops(folder: Path) -> None:
    bad = {"image": "none.png", "question": "?"}
    assert len(read(lines(folder, [*good(8), bad, bad])).skipped) == 2
    with pytest.raises(RequestError, match=r"3 of 11 items .* the limit is 20%.*line 9.*none\.png"):
        read(lines(folder, [*good(8), bad, bad, bad]))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]"])
def test_empty_data_is_an_error(folder: Path, content: bytes) -> None:
    (folder / "empty").write_bytes(content)
    with pytest.raises(RequestError, match="empty is empty"):
        read(str(folder / "empty"))


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("[1,")])
def test_unreadable_data_is_an_error(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "data")
    with pytest.raises(RequestError, match="data"):
        read(str(tmp_path / "data"))


def test_large_files_are_refused_before_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "list.json"
    write_json(path, good(3))
    monkeypatch.setattr(data, "MAX_LIST_FILE", 100)
    with pytest.raises(RequestError, match="limit is 100"):
        read(str(path))
    monkeypatch.setattr(data, "MAX_FILE", 100)
    with pytest.raises(RequestError, match="the limit for such a file is 100"):
        read(lines(folder, good(3)))


def test_no_samples_are_refused() -> None:
    with pytest.raises(RequestError, match="--samples is 0"):
        read_data("scenes", None, 0)
