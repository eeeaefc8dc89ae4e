"""A batch that is interrupted, whatever changes meanwhile: answers are the fresh ones of their lines, or refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.bundles import copy, flip, write_manifest
from tests.support.bundles import manifest as manifest_of
from tests.support.exported import THREADS, Models
from tests.support.fresh import NAMES, FreshAnswers, Setting, shuffled
from tests.support.gated import WAIT
from tests.support.tiny import random_image

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import RequestError, VtxError
from vtx.tools.batch.run import Asking, Batch, journal_of, on_this_machine, run_batch
from vtx.tools.batch.tasks import read_tasks
from vtx.tools.common.loading import Loading

OPTIONS = Options(max_new_tokens=3, ignore_eos=True, logprobs=True)
ASKING = Asking(3, "none", OPTIONS, most_bad=3)
QUESTIONS = ("red?", "how many?", "which one is it?")
FASTV = "fastv:k=3"
SETTINGS: tuple[Setting, ...] = ((3, "none"), (5, "none"), (None, FASTV), (None, "none"), (5, FASTV))
LINES = [
    {"image": "one.png", "question": "red?"},
    {"image": "two.png", "question": "red?"},
    {"image": "two.png", "question": "how many?"},
    {"image": "none.png", "question": "red?"},
    {"image": "one.png", "question": "red?"},
]
Asked = list[tuple[list[str], str, Setting]]


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(reductions=(FASTV,))


class Killed(BaseException):
    """The process ends here, and cleans up nothing."""


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def run(
    model: Model, file: Path, asking: Asking = ASKING, *, die_after: int | None = None, images: Path | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The results, and how many of them were asked in this run, which is killed after `die_after`."""
    out, asked = file.with_name("answers.jsonl"), 0

    def dying(lines: Any) -> Iterator[Any]:
        nonlocal asked
        for result in on_this_machine(model, asking)(lines):
            if asked == die_after:
                raise Killed
            asked += 1
            yield result

    told: list[str] = []
    tasks = read_tasks(file, images)
    outcome = run_batch(dying, Batch(model.bundle.folder, tasks, out, asking), report=lambda *_: None, warn=told.append)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert outcome.failed == sum("error" in result for result in results)
    assert [result["line"] for result in results] == [line.number for line in tasks.lines]
    assert not journal_of(out).exists()
    return results, asked


def kill(model: Model, file: Path, after: int) -> set[int]:
    """Kill a run after so many answers; the numbers of their lines."""
    with pytest.raises(Killed):
        run(model, file, die_after=after)
    _, *answered = journal_of(file.with_name("answers.jsonl")).read_text().splitlines()
    assert len(answered) == after
    return {int(json.loads(line)["item"].split()[0]) for line in answered}


def check(fresh: FreshAnswers, results: list[dict[str, Any]], asking: Asking = ASKING) -> None:
    """`LINES` are answered as fresh ones are, and the image that is missing is an error."""
    for line, result in zip(LINES, results, strict=True):
        if line["image"] == "none.png":
            assert "none.png" in result["error"]
        else:
            fresh.check(result, [line["image"]], line["question"], (asking.k, asking.reduce or "none"))


def test_the_answers_of_these_tests_can_be_told_apart(fresh: FreshAnswers) -> None:
    assert fresh.differ(*(([name], QUESTIONS[0], SETTINGS[0]) for name in NAMES))
    assert fresh.differ(*(([NAMES[0]], question, SETTINGS[0]) for question in QUESTIONS))
    assert fresh.differ(*(([NAMES[0]], QUESTIONS[0], setting) for setting in SETTINGS))
    assert fresh.differ(([*NAMES[:2]], "red?", SETTINGS[0]), ([*NAMES[1::-1]], "red?", SETTINGS[0]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(16))
def test_any_lines_interrupted_anywhere_are_answered_as_fresh_ones(
    model: Model, folder: Path, fresh: FreshAnswers, seed: int
) -> None:
    asked: Asked = shuffled(seed, 8, NAMES, QUESTIONS, SETTINGS)
    file = write(folder, [{"image": n, "question": q, "k": k, "reduce": r} for n, q, (k, r) in asked])
    rng, done = random.Random(seed), 0
    while (step := rng.randint(1, 4)) and done + step < len(asked):
        with pytest.raises(Killed):
            run(model, file, die_after=step)
        done += step
    results, again = run(model, file)
    assert again == len(asked) - done, "nothing is asked twice"
    for one, result in zip(asked, results, strict=True):
        fresh.check(result, *one)


DIES = """
import os, signal, sys
from pathlib import Path
from vtx.runtime.api.options import Options
from vtx.tools.batch.run import Asking, Batch, on_this_machine, run_batch
from vtx.tools.batch.tasks import read_tasks
from vtx.tools.common.loading import Loading
bundle, questions, out, after = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
asking = Asking(3, "none", Options(max_new_tokens=3, ignore_eos=True, logprobs=True), 3)
report = lambda _phase, done, _total: done == after and os.kill(os.getpid(), signal.SIGKILL)
model = Loading("cpu", threads=1).load(bundle)
batch = Batch(bundle, read_tasks(questions, None), out, asking)
run_batch(on_this_machine(model, asking), batch, report=report, warn=print)
"""


def test_a_batch_that_is_killed_loses_and_repeats_nothing(model: Model, folder: Path, fresh: FreshAnswers) -> None:
    """By SIGKILL, in the middle of answers side by side."""
    file = write(folder, LINES)
    arguments = [str(model.bundle.folder), str(file), str(folder / "answers.jsonl"), "2"]
    died = subprocess.run([sys.executable, "-c", DIES, *arguments], capture_output=True, timeout=WAIT, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (folder / "answers.jsonl").exists()
    results, again = run(model, file)
    assert again == len(LINES) - 2, "what was answered is not asked again"
    check(fresh, results)


def test_a_line_cut_short_is_asked_again(model: Model, folder: Path, fresh: FreshAnswers) -> None:
    file = write(folder, LINES)
    kill(model, file, 3)
    journal = journal_of(folder / "answers.jsonl")
    journal.write_bytes(journal.read_bytes()[:-9])
    results, again = run(model, file)
    assert again == 3
    check(fresh, results)


def test_bad_lines_of_the_first_part_count(model: Model, folder: Path) -> None:
    file = write(folder, [*LINES[:4], LINES[3]])
    kill(model, file, 4)
    with pytest.raises(RequestError, match="2 lines cannot be answered, the limit is 1"):
        run(model, file, replace(ASKING, most_bad=1))
    with pytest.raises(RequestError, match="2 lines cannot be answered, the limit is 1"):
        run(model, file, replace(ASKING, most_bad=1))
    assert [("error" in result) for result in run(model, file)[0]] == [False, False, False, True, True]


# --- what changes between the two parts ------------------------------------------------------------


def replaced(folder: Path, name: str) -> None:
    """Another picture under a name, of another time however coarse the file system's clock is."""
    random_image(9).save(folder / name)
    os.utime(folder / name, ns=(1, 1))


def test_a_line_whose_image_was_replaced_is_asked_again(model: Model, folder: Path, fresh: FreshAnswers) -> None:
    file = write(folder, LINES)
    fresh(["one.png"], "red?", SETTINGS[0])
    answered = kill(model, file, 3)
    replaced(folder, "two.png")
    results, again = run(model, file)
    assert again == len(LINES) - len(answered - {2, 3}), "two lines about the new picture and those that were left"
    check(fresh, results)


def test_a_missing_image_that_is_there_again_is_asked_about(model: Model, folder: Path, fresh: FreshAnswers) -> None:
    file = write(folder, LINES)
    kill(model, file, 4)
    (folder / "none.png").write_bytes((folder / "three.png").read_bytes())
    results, _ = run(model, file)
    fresh.check(results[3], ["three.png"], "red?", SETTINGS[0])
    check(fresh, [*results[:3], {"error": "none.png"}, results[4]])


def test_the_same_names_in_another_directory_are_asked_about(model: Model, folder: Path) -> None:
    file, other = write(folder, LINES), folder / "other"
    other.mkdir()
    for number, name in enumerate(NAMES):
        random_image(number + 5).save(other / name)
    answered = kill(model, file, 3)
    results, again = run(model, file, images=other)
    fresh = FreshAnswers(model, {name: other / name for name in NAMES}, OPTIONS)
    assert again == len(LINES) - len(answered & {4}), "the image of line 4 is in neither"
    check(fresh, results)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"k": 5}, "k"),
        ({"k": None}, "k"),
        ({"reduce": FASTV}, "reduce"),
        ({"reduce": f"{FASTV},ratio=0.2"}, "reduce"),
        ({"loading": Loading(fit="pad")}, "fit"),
        ({"loading": Loading("openvino")}, "device"),
        ({"loading": Loading(compute="bf16")}, "compute"),
        ({"options": replace(OPTIONS, max_new_tokens=4)}, "options"),
        ({"options": replace(OPTIONS, ignore_eos=False)}, "options"),
        ({"options": replace(OPTIONS, logprobs=False)}, "options"),
    ],
)
def test_other_settings_are_refused_and_the_first_go_on(
    model: Model, folder: Path, fresh: FreshAnswers, change: dict[str, Any], part: str
) -> None:
    file = write(folder, LINES)
    kill(model, file, 2)
    with pytest.raises(RequestError, match=f"another {part};"):
        run(model, file, replace(ASKING, **change))
    results, again = run(model, file)
    assert again == 3
    check(fresh, results)


@pytest.mark.parametrize(
    "lines", [[*LINES[1:], LINES[0]], [{**LINES[0], "k": 5}, *LINES[1:]], [*LINES, LINES[0]], LINES[:2]]
)
def test_other_questions_are_refused(model: Model, folder: Path, lines: list[dict[str, Any]]) -> None:
    kill(model, write(folder, LINES), 2)
    with pytest.raises(RequestError, match="another lines;"):
        run(model, write(folder, lines))


def test_another_bundle_is_refused(model: Model, folder: Path) -> None:
    """At another path, or another one at the same path; one whose files were damaged does not load."""
    file, other = write(folder, LINES), copy(model.bundle.folder, folder / "bundle")
    kill(model, file, 2)
    with load(other, device="cpu", threads=THREADS) as moved, pytest.raises(RequestError, match="another model;"):
        run(moved, file)
    journal_of(folder / "answers.jsonl").unlink()
    with load(other, device="cpu", threads=THREADS) as first:
        kill(first, file, 2)
    write_manifest(other, {**manifest_of(other), "record": {}})
    with load(other, device="cpu", threads=THREADS) as again, pytest.raises(RequestError, match="another bundle;"):
        run(again, file)
    flip(next((other / "weights").iterdir()))
    with pytest.raises(VtxError, match="SHA-256 differs"):
        load(other, device="cpu", threads=THREADS)


def _swapped(content: bytes) -> bytes:
    """The first two answers under each other's lines."""
    head, *rest = content.splitlines()
    first, second = (json.loads(line) for line in rest[:2])
    first["item"], second["item"] = second["item"], first["item"]
    return b"\n".join([head, *(json.dumps(one).encode() for one in (first, second)), *rest[2:], b""])


@pytest.mark.parametrize(
    "tampered",
    [
        _swapped,
        lambda content: content.replace(b'"stopped":"length"', b'"stopped":"end"', 1),
        lambda content: content.replace(b'"question":"red?"', b'"question":"rad?"', 1),
        lambda content: content.replace(b'{"item"', b'{"itom"', 1),
        lambda content: content.partition(b"\n")[2],
        lambda content: content[:-40] + b"\n",
        lambda content: b"{}\n" + content,
    ],
)
def test_answers_that_were_altered_are_refused(model: Model, folder: Path, tampered: Callable[[bytes], bytes]) -> None:
    file, journal = write(folder, LINES), journal_of(folder / "answers.jsonl")
    kill(model, file, 3)
    content = tampered(journal.read_bytes())
    assert content != journal.read_bytes()
    journal.write_bytes(content)
    with pytest.raises(RequestError, match=r"answers\.jsonl\.journal"):
        run(model, file)
    assert not (folder / "answers.jsonl").exists()


def test_an_output_that_appears_meanwhile_is_replaced_whole(model: Model, folder: Path, fresh: FreshAnswers) -> None:
    file = write(folder, LINES)
    kill(model, file, 2)
    (folder / "answers.jsonl").write_text('{"line": 1, "text": "forged"}\n' * 9)
    check(fresh, run(model, file)[0])
