"""The configuration of vtx-watch: what it may say, and how what is wrong with it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.json_files import write_json

from vtx.runtime.errors import RequestError
from vtx.tools.watch.config import read_config

TOML = """
status = 30
[[source]]
name = "door"
folder = "frames"
rate = 2
reuse = "near"
near = 0.05
[[source.question]]
name = "person"
ask = "Is there a person?"
choices = ["yes", "no"]
every = 1
[[source.question]]
name = "coat"
ask = "What colour is the coat?"
when = {question = "person", equals = "yes"}
report = "changes"
[file]
path = "out/events.jsonl"
"""
ASK: dict[str, Any] = {"name": "a", "ask": "What?"}


def source(**changes: Any) -> dict[str, Any]:
    return {"source": [{"name": "s", "folder": "f", "question": [ASK], **changes}]}


def test_toml_and_json_say_the_same_and_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "watch.toml").write_text(TOML)
    read = read_config(tmp_path / "watch.toml")
    door = read.source[0]
    assert door.folder == str(tmp_path / "frames")
    assert read.file is not None
    assert read.file.path == str(tmp_path / "out" / "events.jsonl")
    assert [question.name for question in door.question] == ["person", "coat"]
    assert door.question[0].settings.options.guide is not None
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    write_json(tmp_path / "watch.json", tomllib.loads(TOML))
    assert read_config(tmp_path / "watch.json") == read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "key 'source' is missing"),
        ({"source": []}, "there are 0 sources; give 1 to 256"),
        (source(colour="red"), "unknown key 'colour'"),
        (source(folder=None), "has no source; give one of camera, stream, pipeline, video, folder"),
        (source(camera="/dev/video0"), "has camera and folder"),
        (source(folder=None, stream="file:///etc/passwd"), "stream must begin with one of rtsp://"),
        (source(folder=None, stream="concat:a|b"), "stream must begin with one of"),
        (source(question=[]), "there are none"),
        (source(question=[ASK, ASK]), "'a' is there twice"),
        (source(question=[{**ASK, "name": "../x"}]), "must be 1 to 64 letters"),
        (source(question=[{**ASK, "every": -1}]), "every is -1; it must be a number from 0"),
        (source(question=[{**ASK, "every": float("nan")}]), "every is nan"),
        (source(question=[{**ASK, "ask": " "}]), "question 'a' asks nothing"),
        (source(question=[{**ASK, "choices": ["x"], "regex": "x"}]), "choices"),
        (source(question=[{**ASK, "max_new_tokens": 0}]), "max_new_tokens is 0"),
        (source(question=[{**ASK, "when": {"question": "b", "equals": "x"}}]), "waits for 'b', which must be another"),
        (source(question=[{**ASK, "when": {"question": "a"}}]), "give equals or contains"),
        (
            source(question=[
                {**ASK, "when": {"question": "b", "equals": "x"}},
                {**ASK, "name": "b", "when": {"question": "a", "equals": "x"}},
            ]),
            "does not wait for it",
        ),
        (source(question=[ASK, {**ASK, "name": "b", "every": 1, "when": {"question": "a", "equals": "x"}}]),
         "has when and another schedule"),
        (source(reuse="near"), "go together"),
        (source(near=0.1), "go together"),
        (source(reuse="embedding"), 'reuse = "embedding" and the threshold moved, e.g. 0.1, go together'),
        (source(reuse="near", near=0.1, moved=0.1), 'reuse = "embedding" and the threshold moved'),
        (source(reuse="embedding", moved=2.5), "moved is 2.5; it must be a number from 0 to 2"),
        (source(reuse="maybe"), "reuse is 'maybe'"),
        (source(size="640x480"), "size is that of a camera"),
        ({**source(), "webhook": [{"url": "http://user:secret@host/"}]}, "without a user"),
        ({**source(), "webhook": [{"url": "gopher://host/"}]}, "a webhook's url must be"),
        ({**source(), "mqtt": {"host": "h", "topic": "a/#"}}, "without + and #"),
        ({"source": [*source()["source"], *source()["source"]]}, "'s' is there twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, given: Any, said: str) -> None:
    write_json(tmp_path / "watch.json", given)
    with pytest.raises(RequestError) as error:
        read_config(tmp_path / "watch.json")
    assert said in str(error.value)


def test_what_is_not_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "watch.toml").write_text("[[source]\n")
    with pytest.raises(RequestError, match=r"watch\.toml is not TOML"):
        read_config(tmp_path / "watch.toml")
    with pytest.raises(RequestError, match=r"other\.toml"):
        read_config(tmp_path / "other.toml")


def test_a_standing_question_has_a_rest_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "watch.json"
    for rest, expected in (("10%", 0.1), (57, 57), (0.25, 0.25)):
        write_json(file, source(question=[{**ASK, "k": 5, "rest": rest}]))
        [question] = read_config(file).source[0].question
        assert (question.settings.k, question.settings.options.rest) == (5, expected)
    write_json(file, source(question=[{**ASK, "k": 5, "rest": "much"}]))
    with pytest.raises(RequestError, match=r"rest is 'much'; it must be a share of the image tokens"):
        read_config(file)
