"""A batch: order kept, bad lines told and counted, nothing asked twice after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.runtime.session.test_videos import VIDEO_LLAVA
from tests.support.exported import Models
from tests.support.tiny import random_image
from vtx.cli import batch
from vtx.exporter.batch.run import How, journal_of, on_this_machine, run_batch
from vtx.exporter.batch.tasks import BadLine, read_tasks
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import RequestError

HOW = How(3, "none", Options(max_new_tokens=6, ignore_eos=True), most_bad=3)
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


def run(model: Model, file: Path, how: How = HOW) -> tuple[list[Any], list[str]]:
    """The results, and what was told of bad lines."""
    told: list[str] = []
    out = file.with_name("answers.jsonl")
    tasks, answer = read_tasks(file, None), on_this_machine(model, how)
    run_batch(answer, model.bundle.folder, tasks, out, how, report=lambda *_: None, tell=told.append)
    return [json.loads(line) for line in out.read_text().splitlines()], told


def expected(model: Model, folder: Path, line: Any) -> list[int]:
    names = line.get("image", [])
    images = [folder / name for name in ([names] if isinstance(names, str) else names)]
    return list(model.open(images).ask(line["question"], 3, HOW.options, reduce="none").token_ids)


def test_answers_stand_in_the_order_of_the_questions_with_the_ids_of_fresh_runs(model: Model, folder: Path) -> None:
    results, told = run(model, write(folder, *LINES))
    assert [result["token_ids"] for result in results] == [expected(model, folder, line) for line in LINES]
    assert [result["id"] for result in results] == ["a", "b", None, 4, "e"]
    assert [result["line"] for result in results] == [1, 2, 3, 4, 5]
    assert results[1]["reused_image"], "the same image in a row is computed once"
    assert not told
    assert not journal_of(folder / "answers.jsonl").exists()


def test_a_line_may_name_videos_beside_images(models: Models, folder: Path) -> None:
    """The template prints images first, so a video that is named before them stands behind them."""
    pytest.importorskip("av", reason="the [video] extra is not installed")
    from tests.runtime.vision.test_video import write as write_video

    model = models(VIDEO_LLAVA, (3, 5))
    clip = write_video(folder / "clip.mp4", frames=12)
    lines = [{"image": "one.png", "video": "clip.mp4"}, {"image": ["clip.mp4", "one.png"]}, {"video": "one.png"}]
    results, told = run(model, write(folder, *({**line, "question": "which?"} for line in lines)))
    wanted = model.open([folder / "one.png", clip]).ask("which?", 3, HOW.options, reduce="none")
    assert [result["token_ids"] for result in results[:2]] == 2 * [list(wanted.token_ids)]
    assert wanted.stats.vision_tokens == 16 + 8 * 17
    assert "one.png' is not a video" in told[0]


def test_bad_lines_are_told_and_stand_as_errors_in_their_place(model: Model, folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"no image")
    bad = [b"{", {"image": "broken.png", "question": "red?"}, {"image": "one.png"}]
    results, told = run(model, write(folder, LINES[0], bad[0], bad[1], b"", LINES[1], bad[2]))
    assert ["error" in result for result in results] == [False, True, True, False, True]
    assert [result["line"] for result in results] == [1, 2, 3, 5, 6]
    assert [line.partition(":")[0] for line in told] == ["line 2", "line 3", "line 6"]


def test_too_many_bad_lines_end_the_batch_and_leave_no_output(model: Model, folder: Path) -> None:
    file = write(folder, LINES[0], *[b"{"] * 4)
    with pytest.raises(RequestError, match="4 lines cannot be answered, the limit is 3"):
        run(model, file)
    assert not (folder / "answers.jsonl").exists()


def test_an_interrupted_batch_goes_on_where_it_was(model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write(folder, *LINES), folder / "answers.jsonl"
    asked: list[int] = []
    prefill = type(model.backend).head

    def counting(backend: Any, rows: Any) -> Any:
        if len(asked) == 15:
            raise KeyboardInterrupt
        asked.append(1)
        return prefill(backend, rows)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.backend), "head", counting)
        with pytest.raises(KeyboardInterrupt):
            run(model, file)
    assert not out.exists()
    kept = journal_of(out).read_text().splitlines()
    assert len(kept) == 3, "the identity and two answers of six tokens"
    with journal_of(out).open("a") as journal:
        journal.write('{"item": "3", "id"')  # a line cut short
    resumed: list[int] = []

    def recording(backend: Any, rows: Any) -> Any:
        resumed.append(1)
        return prefill(backend, rows)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.backend), "head", recording)
        results, _ = run(model, file)
    assert len(resumed) == 18, "three answers of six tokens"
    assert [result["token_ids"] for result in results] == [expected(model, folder, line) for line in LINES]


def test_a_journal_of_other_lines_or_options_is_refused(
    model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="limit is 0"):
        run(model, write(folder, LINES[0], b"{"), How(3, "none", HOW.options, 0))
    with pytest.raises(RequestError, match="another lines"):
        run(model, write(folder, LINES[1]))
    with pytest.raises(RequestError, match="another k"):
        run(model, write(folder, LINES[0], b"{"), How(5, "none", HOW.options, 0))
    for other, part in (({"fit": "pad"}, "fit"), ({"device": "openvino"}, "device"), ({"compute": "bf16"}, "compute")):
        with pytest.raises(RequestError, match=f"another {part}"):
            run(model, write(folder, LINES[0], b"{"), How(3, "none", HOW.options, 0, **other))
    monkeypatch.setattr("vtx.exporter.batch.run.sha256", lambda _: "exported again")
    with pytest.raises(RequestError, match="another bundle"):
        run(model, write(folder, LINES[0], b"{"), How(3, "none", HOW.options, 0))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"image": "../secret.png", "question": "red?"}, "lies outside"),
        ({"image": "/etc/passwd", "question": "red?"}, "lies outside"),
        ({"image": 5, "question": "red?"}, "must be a file name"),
        ({"image": ["one.png"] * 65, "question": "red?"}, "65 images"),
        ({"image": "one.png", "question": " "}, "no question"),
        ([], "not an object"),
        (b"\xff", "UTF-8"),
        (b'"' + b"x" * (1 << 20) + b'"', "the limit"),
    ],
)
def test_a_line_that_asks_nothing_is_bad_for_a_reason(folder: Path, line: Any, reason: str) -> None:
    (bad,) = read_tasks(write(folder, line), None).lines
    assert isinstance(bad, BadLine)
    assert reason in bad.reason


def test_the_command_answers_and_counts(model: Model, folder: Path) -> None:
    file, out = write(folder, LINES[0], b"{", LINES[3]), folder / "answers.jsonl"
    words = [str(file), str(out), "--bundle", str(model.bundle.folder), "--k", "3", "--max-new-tokens", "4"]
    done = CliRunner().invoke(batch, [*words, "--threads", "1", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "2 answers in" in done.stderr
    assert "1 bad line" in done.stderr
    assert len(out.read_text().splitlines()) == 3


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
