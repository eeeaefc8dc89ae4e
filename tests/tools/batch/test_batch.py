"""A batch: order kept, bad lines told and counted, nothing asked twice after an interruption."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result
from tests.support.exported import Models
from tests.support.families.videos import VIDEO_LLAVA
from tests.support.tiny import random_image
from tests.support.video_files import write_video

from vtx.cli import batch
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ModelClosedError, RequestError
from vtx.runtime.scheduler.scheduler import ClosedError
from vtx.runtime.vision.image import load_image
from vtx.tools.batch.run import Asking, Batch, journal_of, on_this_machine, run_batch
from vtx.tools.batch.tasks import BadLine, Task, read_tasks

ASKING = Asking(3, "none", Options(max_new_tokens=6, ignore_eos=True), most_bad=3)
LINES: list[Any] = [
    {"id": "a", "image": "one.png", "question": "red?"},
    {"id": "b", "image": "one.png", "question": "how many?"},
    {"image": ["two.png", "one.png"], "question": "which?"},
    {"id": 4, "question": "describe the picture"},
    {"id": "e", "image": "two.png", "question": "red?"},
]


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_image(1).save(tmp_path / "one.png")
    random_image(2).save(tmp_path / "two.png")
    return tmp_path


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "questions.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return file


def run(model: Model, file: Path, asking: Asking = ASKING) -> tuple[list[Any], list[str]]:
    """The results, and what was told of bad lines."""
    told: list[str] = []
    out = file.with_name("answers.jsonl")
    tasks, answer = read_tasks(file, None), on_this_machine(model, asking)
    run_batch(answer, Batch(model.bundle.folder, tasks, out, asking), report=lambda *_: None, warn=told.append)
    return [json.loads(line) for line in out.read_text().splitlines()], told


def expected(model: Model, folder: Path, line: Any) -> list[int]:
    names = line.get("image", [])
    images = [folder / name for name in ([names] if isinstance(names, str) else names)]
    return list(model.open(images).ask(line["question"], 3, ASKING.options, reduce="none").token_ids)


def test_a_byte_order_mark_costs_no_line(model: Model, folder: Path) -> None:
    file = write(folder, *LINES[:2])
    mark = b"\xef\xbb\xbf"
    file.write_bytes(mark + file.read_bytes().replace(b"\n", b"\n" + mark, 1))
    results, told = run(model, file)
    assert ([result["id"] for result in results], told) == (["a", "b"], [])


def test_a_failed_line_keeps_its_id_whatever_is_wrong_with_it(model: Model, folder: Path) -> None:
    bad: list[Any] = [
        {"id": "a", "image": "one.png", "question": ""},
        {"id": 7, "image": "/etc/passwd", "question": "red?"},
        {"id": "c", "image": 5, "question": "red?", "more": 1},
        {"custom_id": "d", "method": "GET", "url": "/v1/chat/completions", "body": {}},
        {"custom_id": "e", "body": 5},
    ]
    results, _ = run(model, write(folder, *bad), replace(ASKING, most_bad=5))
    assert [result.get("id") for result in results[:3]] == ["a", 7, "c"]
    assert [result["custom_id"] for result in results[3:]] == ["d", "e"]
    assert [result["response"]["status_code"] for result in results[3:]] == [400, 400]
    assert all(result["error"] for result in results)


def test_two_lines_with_one_custom_id_are_refused_before_any_work(folder: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
    with pytest.raises(RequestError, match=r"lines 1 and 3 of questions.jsonl have the same custom_id 'a'.*rename"):
        read_tasks(write(folder, line, line | {"custom_id": "b"}, line | {"body": 5}), None)


def test_answers_stand_in_the_order_of_the_questions_with_the_ids_of_fresh_runs(model: Model, folder: Path) -> None:
    results, told = run(model, write(folder, *LINES))
    assert [result["token_ids"] for result in results] == [expected(model, folder, line) for line in LINES]
    assert [result["id"] for result in results] == ["a", "b", None, 4, "e"]
    assert [result["line"] for result in results] == [1, 2, 3, 4, 5]
    assert results[1]["reused_image"], "the same image in a row is computed once"
    assert not told
    assert not journal_of(folder / "answers.jsonl").exists()


def test_a_picture_of_several_lines_is_decoded_once(model: Model, folder: Path) -> None:
    """Also where another one stands between them, or it has another name."""
    (folder / "copy.png").write_bytes((folder / "one.png").read_bytes())
    names: list[Any] = ["one.png", ["two.png", "one.png"], "two.png", "copy.png", ["copy.png", "two.png"]]
    lines = [{"image": image, "question": "red?"} for image in names]
    wanted = [expected(model, folder, line) for line in lines]
    with patch("vtx.runtime.api.images.load_image", wraps=load_image) as read:
        results, _ = run(model, write(folder, *lines))
    assert [result["token_ids"] for result in results] == wanted
    assert read.call_count == 4, "each of the two alone, and beside another picture"


def test_a_line_may_name_videos_beside_images(models: Models, folder: Path) -> None:
    """The template prints images first, so a video that is named before them stands behind them."""
    pytest.importorskip("av", reason="the [video] extra is not installed")
    model = models(VIDEO_LLAVA, (3, 5))
    clip = write_video(folder / "clip.mp4", frames=12)
    lines = [{"image": "one.png", "video": "clip.mp4"}, {"image": ["clip.mp4", "one.png"]}, {"video": "one.png"}]
    results, told = run(model, write(folder, *({**line, "question": "which?"} for line in lines)))
    wanted = model.open([folder / "one.png", clip]).ask("which?", 3, ASKING.options, reduce="none")
    assert [result["token_ids"] for result in results[:2]] == 2 * [list(wanted.token_ids)]
    assert wanted.stats.vision_tokens == 16 + 8 * 17
    assert "one.png' is not a video" in told[0]


def test_bad_lines_are_told_and_stand_as_errors_in_their_place(model: Model, folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"no image")
    bad = [b"{", {"id": "x", "image": "broken.png", "question": "red?"}, {"image": "one.png"}]
    results, told = run(model, write(folder, LINES[0], bad[0], bad[1], b"", LINES[1], bad[2]))
    assert ["error" in result for result in results] == [False, True, True, False, True]
    assert [result["line"] for result in results] == [1, 2, 3, 5, 6]
    assert [result["id"] for result in results] == ["a", None, "x", "b", None]
    assert [line.partition(":")[0] for line in told] == ["line 2", "line 3", "line 6"]


def test_too_many_bad_lines_end_the_batch_and_leave_no_output(model: Model, folder: Path) -> None:
    file = write(folder, LINES[0], *[b"{"] * 4)
    with pytest.raises(RequestError, match="4 lines cannot be answered, the limit is 3"):
        run(model, file)
    assert not (folder / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"image": "../secret.png", "question": "red?"}, "lies outside"),
        ({"image": "/etc/passwd", "question": "red?"}, "lies outside"),
        ({"image": 5, "question": "red?"}, "must be a file name"),
        ({"image": ["one.png"] * 65, "question": "red?"}, "65 images"),
        ({"image": "one.png", "question": " "}, "no question"),
        ({"image": "one.png", "question": "red?", "max_tokens": 5}, "unknown field 'max_tokens'; a line may have que"),
        ([], "not an object"),
        (b"\xff", "UTF-8"),
        (b'"' + b"x" * (1 << 20) + b'"', "the limit"),
    ],
)
def test_a_line_that_asks_nothing_is_bad_for_a_reason(folder: Path, line: Any, reason: str) -> None:
    (bad,) = read_tasks(write(folder, line), None).lines
    assert isinstance(bad, BadLine)
    assert reason in bad.reason


def command(model: Model, file: Path, out: Path) -> Result:
    words = [str(file), str(out), "--bundle", str(model.bundle.folder), "--k", "3", "--max-new-tokens", "4"]
    return CliRunner().invoke(batch, [*words, "--threads", "1", "--device", "cpu"])


def test_a_right_answer_in_a_line_is_no_fault(folder: Path) -> None:
    (task,) = read_tasks(write(folder, {**LINES[0], "answer": "yes"}), None).lines
    assert isinstance(task, Task)


def test_the_command_answers_and_counts(model: Model, folder: Path) -> None:
    out = folder / "answers.jsonl"
    done = command(model, write(folder, LINES[0], LINES[3]), out)
    assert done.exit_code == 0, done.output
    assert "2 answers in" in done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2]
    assert [(len(answer["token_ids"]), answer["stopped"]) for answer in answers] == 2 * [(4, "length")]


@pytest.mark.parametrize("answered", [0, 2])
def test_the_command_fails_where_a_line_does(model: Model, folder: Path, answered: int) -> None:
    file, out = write(folder, *LINES[:answered], b"{", {**LINES[0], "image": "none.png"}), folder / "answers.jsonl"
    done = command(model, file, out)
    assert done.exit_code == 1
    assert f"2 of {2 + answered} lines failed" in done.stderr
    assert ["error" in json.loads(line) for line in out.read_text().splitlines()] == answered * [False] + 2 * [True]


def test_a_line_has_settings_of_its_own(models: Models, folder: Path) -> None:
    model = models(reductions=("fastv:k=3",))
    own: list[dict[str, Any]] = [
        {}, {"k": 5}, {"reduce": "fastv:k=3,ratio=0.2"}, {"k": None, "reduce": "fastv:k=3"}, {"k": "none"},
        {"k": 4}, {"k": "5"}, {"k": True}, {"reduce": 5}, {"reduce": "fastvv"},
    ]  # fmt: skip
    results, told = run(
        model, write(folder, *({**LINES[0], **settings} for settings in own)), replace(ASKING, most_bad=5)
    )
    assert [(result["k"], result["reduce"]) for result in results[:5]] == [
        (3, "none"), (5, "none"), (3, "fastv:k=3,ratio=0.2"), (None, "fastv:k=3,ratio=0.5"), (None, "none"),
    ]  # fmt: skip
    for settings, result in zip(own[:5], results[:5], strict=True):
        asked = {"k": 3, "reduce": "none", **settings}
        fresh = model.open([folder / "one.png"]).ask("red?", asked["k"], ASKING.options, reduce=asked["reduce"])
        assert result["token_ids"] == list(fresh.token_ids)
    reasons = ("K = 4 was not prebuilt", "K is '5'", "K is True", "reduce is 5", "fastvv")
    assert len(told) == len(reasons)
    assert all(reason in line for reason, line in zip(reasons, told, strict=True)), told


def test_a_line_has_a_system_text_and_sampling_of_its_own(models: Models, folder: Path) -> None:
    model = models()
    own: list[dict[str, Any]] = [
        {"system": "the image is red"}, {"temperature": 1.5, "seed": 3, "max_new_tokens": 9}, {"stop": ["e"]},
        {"temperature": -1}, {"system": 5}, {"max_new_tokens": "9"},
    ]  # fmt: skip
    results, told = run(model, write(folder, *({**LINES[0], **settings} for settings in own)))
    for settings, result in zip(own[:3], results[:3], strict=True):
        keywords = {name: value for name, value in settings.items() if name != "system"}
        opened = model.open([folder / "one.png"], system=settings.get("system"))
        fresh = opened.ask("red?", 3, ASKING.options, reduce="none", **keywords)
        assert (result["token_ids"], result["stopped"]) == (list(fresh.token_ids), fresh.stopped)
    said = ("line 4: temperature is -1", "line 5: system is 5", "line 6: max_new_tokens is '9'")
    assert [line.startswith(start) for line, start in zip(sorted(told), said, strict=True)] == [True] * 3, told


def test_a_line_chooses_tokens_by_a_text_of_its_own(models: Models, folder: Path) -> None:
    spec = "cdpruner:keep=4"
    own = [{"reduce": spec, "about": "the dog"}, {"about": "the dog"}, {"reduce": spec, "about": ""}]
    results, told = run(models(), write(folder, *({**LINES[0], "k": None, **settings} for settings in own)))
    with models().open([folder / "one.png"]) as image:
        wanted = image.ask("the dog", None, ASKING.options, reduce=spec).to_dict()["kept"]
    assert results[0]["kept"][0]["patches"] == [[*patches] for patches in wanted[0]["patches"]]
    assert sorted(line.split(";")[0] for line in told) == [
        "line 2: about is the text by which image tokens are chosen before the decoder, and reduce=none chooses none "
        "by a text",
        "line 3: about is empty",
    ]


def test_a_model_that_is_closed_ends_the_batch_and_is_no_fault_of_a_line(model: Model, folder: Path) -> None:
    tasks = read_tasks(write(folder, *LINES), None)
    with load(model.bundle.folder, device="cpu", threads=1) as closing:
        results = on_this_machine(closing, replace(ASKING, parallel=1))(tasks.lines)
        assert next(results)[1]["token_ids"]
        closing.close()
        with pytest.raises((ModelClosedError, ClosedError)):
            list(results)


def test_a_line_is_another_one_once_a_file_of_it_changes(folder: Path) -> None:
    for line in ({"image": ["one.png", "two.png"]}, {"video": ["one.png", "two.png"]}, {"question": "where?"}):
        (task,) = read_tasks(write(folder, {"question": "red?", **line}), None).lines
        before = task.key
        assert (task.key, before.split()[0]) == (before, "1")
        os.utime(folder / "two.png", ns=(1, 1))
        assert (task.key == before) == ("question" in line)
        random_image(2).save(folder / "two.png")


@pytest.mark.parametrize(
    ("answers", "further", "message"),
    [
        (".", [], "it is a directory; name a file"),
        ("absent/answers.jsonl", [], "absent is not a directory"),
        ("answers.jsonl", ["--reduce", "nothing"], "no reduction is called 'nothing'"),
    ],
)
def test_what_can_never_be_written_or_asked_is_told_before_a_bundle_is_looked_for(
    folder: Path, answers: str, further: list[str], message: str
) -> None:
    file = write(folder, LINES[0])
    done = CliRunner().invoke(batch, [str(file), str(folder / answers), "--bundle", "no-such-bundle", *further])
    assert done.exit_code == 1
    assert message in done.stderr
    assert "no-such-bundle" not in done.stderr


def test_answers_do_not_replace_their_questions(model: Model, folder: Path) -> None:
    file = write(folder, LINES[0])
    before = file.read_bytes()
    (folder / "again.jsonl").symlink_to(file)
    done = CliRunner().invoke(batch, [str(file), str(folder / "again.jsonl"), "--bundle", str(model.bundle.folder)])
    assert done.exit_code == 1
    assert "holds the questions, which the answers would replace" in done.stderr
    assert file.read_bytes() == before


def test_an_empty_file_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="is empty"):
        read_tasks(write(folder, b""), None)


def test_lines_of_openais_batch_file_are_answered_in_its_form(model: Model, tmp_path: Path) -> None:
    from tests.support.serving import user

    def line(name: Any, **body: Any) -> dict[str, Any]:
        fields = {"model": "any", "messages": [user("red?", random_image(1))], "max_tokens": 4, "ignore_eos": True}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**fields, **body}}

    lines = [
        line("a"), line("b", k="none", temperature=1.5, seed=3, n=2), line("c", temprature=1),
        line("d", messages=[{"role": "system", "content": "Be brief."}, user("red?")]),
        {**line("e"), "url": "/v1/embeddings"}, {"question": "red?"}, line("f", messages=[user("red " * 4000)]),
        {**line("g"), "url": "/v1/responses", "body": {"model": "any", "input": "red?", "max_output_tokens": 4}},
        {**line("h"), "url": "/v1/completions", "body": {"model": "any", "prompt": ["USER: red? ASSISTANT:", "a"]}},
        line("i", reasoning_effort="high"),
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        "--bundle",
        model.bundle.folder,
        "--k",
        3,
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(batch, [*map(str, words), "--max-new-tokens", "3", "--reduce", "none"])
    assert done.exit_code == 1
    assert "4 of 10 lines failed" in done.stderr
    a, b, c, d, e, own, f, g, h, i = [
        json.loads(answer) for answer in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    expected = model.open(random_image(1)).ask("red?", 3, reduce="none", max_new_tokens=4, ignore_eos=True)
    assert (a["custom_id"], a["error"], a["response"]["status_code"]) == ("a", None, 200)
    assert a["response"]["body"]["object"] == "chat.completion"
    assert a["response"]["body"]["usage"]["vtx"]["token_ids"] == list(expected.token_ids)
    assert len(b["response"]["body"]["choices"]) == len(h["response"]["body"]["choices"]) == 2
    assert "no switch for thoughts" in i["error"]["message"]
    seeded = model.open(random_image(1)).ask(
        "red?", None, reduce="none", max_new_tokens=4, ignore_eos=True, temperature=1.5, seed=4
    )
    assert b["response"]["body"]["usage"]["vtx"]["answers"][1]["token_ids"] == list(seeded.token_ids)
    assert (c["response"]["status_code"], c["error"]["code"]) == (400, "unknown_parameter")
    assert "temprature" in c["error"]["message"]
    assert d["response"]["status_code"] == 200
    assert (e["response"]["status_code"], "its method must be POST and its url" in e["error"]["message"]) == (400, True)
    assert own["line"] == 6
    assert len(own["token_ids"]) <= 3
    assert f["error"]["code"] == "context_length_exceeded"
    assert (g["response"]["body"]["object"], h["response"]["body"]["object"]) == ("response", "text_completion")
