"""The commands: what they print, where, and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import vtx
from tests.support import bundles
from tests.support.commands import fails, invoke, process
from tests.support.fixtures import Checkpoints
from tests.support.gated import WAIT
from tests.support.tiny import Tiny
from vtx.runtime.backends.engines import COMPUTE, DEVICES
from vtx.runtime.errors import VtxError
from vtx.runtime.terminal import console

pytestmark = pytest.mark.usefixtures("home")

FIELDS = {
    "text", "token_ids", "k", "full_layers", "exit_layer", "prompt_tokens", "vision_tokens", "vision_tokens_kept",
    "kv_slots", "kv_bytes", "reused_image", "reused_layers", "reused_tokens", "not_reused", "device", "compute",
    "precision", "timings_ms", "reduce", "rest", "question", "image", "bundle", "stopped",
}  # fmt: skip
TIMINGS = {"load", "vision", "prefill", "first_token", "decode_per_token"}
COMMANDS = ("export", "run", "inspect", "doctor")
QUESTION = "what is it?"


# ---- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_and_every_option_has_a_word(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"vtx-{command}" in result.stdout.partition("Examples")[2]
    assert invoke(command, "-h").stdout == result.stdout


def test_examples_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    examples = invoke("run", "--help").stdout.partition("Examples")[2]
    assert '  vtx-run image.jpg "How many shapes are there?" "Where is the star?" --k 16 --json\n' in examples


@pytest.mark.parametrize("command", ["export", "run", "inspect", "doctor", "plan", "bench", "build", "calibrate"])
def test_every_command_tells_its_version(command: str) -> None:
    assert vtx.__version__ in invoke(command, "--version").stdout


def test_help_names_every_device_and_arithmetic() -> None:
    words = set(re.findall(r"[a-z0-9]+", invoke("run", "--help").stdout))
    assert {*DEVICES, *COMPUTE} <= words


def test_a_precision_may_be_written_in_capitals() -> None:
    done = invoke("plan", "--model", "vila-7b", "--precision", "INT4", "--k", "none", "--json")
    assert list(json.loads(done.stdout)["weights_bytes"]) == ["int4"]


@pytest.mark.parametrize(
    "words",
    [["nope.jpg", "q"], ["--text-only", "q", "--reduce", "nothing"], ["--text-only", "what?", " "]],
)
def test_a_wrong_argument_is_told_before_a_bundle_is_looked_for(words: list[str], home: Path) -> None:
    """Without a bundle the demo would be exported first, which takes seconds."""
    fails("run", *words)
    assert not list(home.iterdir())


@pytest.mark.sampled
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "words",
    [["inspect", "{bundle}"], ["run", "--bundle", "{bundle}", "--text-only", "q"], ["run", "--help"], ["--help"]],
)
def test_a_full_disk_under_stdout_is_one_line(bundle: Path, words: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        child = process(*(word.format(bundle=bundle) for word in words), stdout=full)
        _, stderr = child.communicate()
    assert child.returncode == 1
    assert b"cannot write the output (No space left on device)" in stderr
    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", []),
        ("run", ["image.png"]),
        ("run", ["image.png", "q", "--k", "three"]),
        ("run", ["image.png", "q", "--max-new-tokens", "many"]),
        ("run", ["image.png", "q", "--nothing"]),
        ("run", ["image.png", "q", "--device", "abacus"]),
        ("export", ["--k", "8,"]),
        ("export", ["--k", "x"]),
        ("export", ["--precision", "int3"]),
        ("export", ["--max-memory", "much"]),
        ("export", ["surplus"]),
        ("doctor", ["a", "b"]),
        ("main", ["nothing"]),
    ],
)
def test_wrong_usage_exits_with_two(command: str, words: list[str]) -> None:
    assert "Usage" in fails(command, *words, code=2)


# ---- vtx-run ---------------------------------------------------------------------------------------------------------


def test_an_answer_alone_stands_on_stdout(bundle: Path, image: Path) -> None:
    result = invoke("run", image, QUESTION, "--bundle", bundle, "--max-new-tokens", 8)
    assert result.exit_code == 0
    with vtx.load(bundle, threads=1).open(image) as opened:
        assert result.stdout == opened.ask(QUESTION, options=vtx.Options(max_new_tokens=8)).text + "\n"
    assert "cpu" in result.stderr


def test_json_has_the_promised_fields_and_stands_alone_on_stdout(bundle: Path, image: Path) -> None:
    words = [image, QUESTION, "which shape?", "--bundle", bundle, "--json", "--max-new-tokens", 5, "--ignore-eos"]
    result = invoke("run", *words)
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    for answer in (first, second):
        assert set(answer) == FIELDS
        assert set(answer["timings_ms"]) == TIMINGS
        assert all(value >= 0 for value in answer["timings_ms"].values())
        assert len(answer["token_ids"]) == 5
        assert (answer["k"], answer["full_layers"], answer["exit_layer"]) == (3, 2, 2)
        assert answer["vision_tokens"] == 16
        assert answer["vision_tokens_kept"] == [16, 16, 0, 0, 0, 0, 0, 0]
        n = answer["prompt_tokens"]
        assert answer["kv_slots"] == [n, n, *[n - 16] * 6]
        assert answer["kv_bytes"] == sum(answer["kv_slots"]) * 2 * 2 * 16 * 4
        assert (answer["device"], answer["precision"]) == ("cpu", "fp32")
    assert (first["reused_image"], second["reused_image"]) == (False, True)
    assert result.stderr == ""


def test_json_without_withdrawal_has_no_exit_layer(bundle: Path, image: Path) -> None:
    answer = json.loads(invoke("run", image, QUESTION, "--bundle", bundle, "--json", "--k", "none").stdout)
    assert (answer["k"], answer["full_layers"], answer["exit_layer"]) == (None, 8, None)
    assert answer["vision_tokens_kept"] == [16] * 8


def test_an_image_comes_from_stdin(bundle: Path, image: Path) -> None:
    words = [QUESTION, "--bundle", bundle, "--json", "--max-new-tokens", 5]
    piped = json.loads(invoke("run", "-", *words, data=image.read_bytes()).stdout)
    assert piped["token_ids"] == json.loads(invoke("run", image, *words).stdout)["token_ids"]


def test_nothing_on_stdin_is_one_line(bundle: Path) -> None:
    result = invoke("run", "-", QUESTION, "--bundle", bundle, data=b"")
    assert (result.exit_code, result.stdout) == (1, "")


def test_questions_without_an_image_and_with_two(bundle: Path, image: Path) -> None:
    words = ["--bundle", bundle, "--json", "--max-new-tokens", 3]
    assert json.loads(invoke("run", "--text-only", QUESTION, *words).stdout)["vision_tokens"] == 0
    assert json.loads(invoke("run", image, "--image", image, QUESTION, *words).stdout)["vision_tokens"] == 32


def test_the_turns_of_a_chat_build_on_each_other(bundle: Path, image: Path) -> None:
    words = [image, QUESTION, QUESTION, "--bundle", bundle, "--json", "--max-new-tokens", 3]
    alone, talk = (
        [json.loads(line)["prompt_tokens"] for line in invoke("run", *words, *more).stdout.splitlines()]
        for more in ([], ["--chat"])
    )
    assert alone[0] == alone[1] == talk[0] < talk[1]


def test_a_seed_makes_a_sampled_answer_reproducible(bundle: Path, image: Path) -> None:
    words = [image, QUESTION, "--bundle", bundle, "--json", "--max-new-tokens", 20, "--temperature", 2]
    ids = [json.loads(invoke("run", *words, "--seed", seed).stdout)["token_ids"] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--k", "1"], r"outside 2\.\.8"),
        (["--k", "9"], r"outside 2\.\.8"),
        (["--k", "-3"], r"outside 2\.\.8"),
        (["--k", "4"], "has 3, 5;"),
        (["--k", "auto"], "gates"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "inf"], "temperature"),
        (["--top-p", "0"], "top-p"),
        (["--top-p", "2"], "top-p"),
        (["--top-p", "nan"], "top-p"),
        (["--top-k", "-1"], "top-k"),
        (["--seed", "-1"], "seed"),
        (["--threads", "0"], "threads"),
        (["--threads", "-4"], "threads"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_line(bundle: Path, image: Path, words: list[str], named: str) -> None:
    assert re.search(named, fails("run", image, QUESTION, "--bundle", bundle, "--json", *words))


@pytest.mark.parametrize("question", ["", "   ", "\n\t"])
def test_an_empty_question_is_one_line(bundle: Path, image: Path, question: str) -> None:
    assert "empty" in fails("run", image, question, "--bundle", bundle, "--json")


def test_a_question_too_long_says_how_many_tokens_fit(bundle: Path, image: Path) -> None:
    message = fails("run", image, "what " * 300, "--bundle", bundle, "--json")
    assert "255 fit" in message
    assert "16 of them for images" in message
    assert message.endswith("the model itself has no more positions\n")


@pytest.mark.slow
def test_a_context_just_full_gives_one_token_and_one_more_does_not_fit(bundle: Path, image: Path) -> None:
    def prompt(count: int) -> int:
        return len(model.loaded.text.prompt([{"role": "user", "content": [
            {"type": "image"}, {"type": "text", "text": "?" * count}]}], 16))  # fmt: skip

    model = vtx.load(bundle, threads=1)
    count = next(count for count in range(1, 400) if prompt(count) == 255)
    with model.open(image) as opened:
        answer = opened.ask("?" * count, options=vtx.Options(ignore_eos=True))
        assert (len(answer.token_ids), answer.stopped) == (1, "context")
        with pytest.raises(VtxError, match="by 1 tokens"):
            opened.ask("?" * (count + 1))
        two = opened.ask("?" * (count - 1), options=vtx.Options(ignore_eos=True))
        assert (len(two.token_ids), two.stopped) == (2, "context")
        for limit, stopped in (
            (1, "length"),
            (2, "length"),
            (3, "context"),
        ):  # room for 2: a limit of 2 is what ends it
            few = opened.ask("?" * (count - 1), options=vtx.Options(limit, ignore_eos=True))
            assert (len(few.token_ids), few.stopped) == (min(limit, 2), stopped)
    result = invoke("run", image, "?" * count, "--bundle", bundle, "--ignore-eos")
    assert "context is full" in result.stderr


def _bad_images(folder: Path) -> dict[str, Path]:
    (folder / "text.jpg").write_text("no image")
    (folder / "empty.png").write_bytes(b"")
    (folder / "directory").mkdir()
    size = (60_000).to_bytes(4, "big")
    (folder / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + size * 2 + b"\x08\x02\0\0\0" + b"\0" * 32)
    return {name: folder / name for name in ("missing.png", "text.jpg", "empty.png", "directory", "huge.png")}


@pytest.mark.parametrize("name", ["missing.png", "text.jpg", "empty.png", "directory", "huge.png"])
def test_an_image_that_is_none_is_one_line(bundle: Path, tmp_path: Path, name: str) -> None:
    assert name in fails("run", _bad_images(tmp_path)[name], QUESTION, "--bundle", bundle, "--json")


# ---- which bundle ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_bundle_is_the_one_named_else_the_environment_s_else_the_last_exported(
    bundle: Path, image: Path, tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = [image, QUESTION, "--json", "--max-new-tokens", 1], tmp_path / "mine"
    made = invoke("export", "--model", tiny_checkpoint(), "--k", "5,3", "--precision", "fp32", "--out", out)
    assert made.exit_code == 0, made.output
    assert json.loads(invoke("run", *words).stdout)["k"] == 5
    monkeypatch.setenv("VTX_BUNDLE", str(bundle))
    assert json.loads(invoke("run", *words).stdout)["k"] == 3
    assert json.loads(invoke("run", *words, "--bundle", out).stdout)["k"] == 5


@pytest.mark.parametrize("name", ["missing", "home", "image.png"])
def test_a_bundle_that_is_none_is_one_line(image: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(image, tmp_path / "image.png")
    assert "vtx-export" in fails("run", image, QUESTION, "--bundle", tmp_path / name)
    assert name in fails("inspect", tmp_path / name)
    assert name in fails("doctor", tmp_path / name)


@pytest.mark.sampled
@pytest.mark.parametrize("noted", [b"/nowhere/at/all", b"\xff\xfe\n", b"", b"x" * 5000, b"a\0b"])
def test_a_note_of_the_last_bundle_that_leads_nowhere_gives_the_demo(
    home: Path, bundle: Path, image: Path, monkeypatch: pytest.MonkeyPatch, noted: bytes
) -> None:
    note = home / ".local/state/vtx/last-bundle"
    note.parent.mkdir(parents=True)
    note.write_bytes(noted)
    shutil.copytree(bundle, home / ".cache/vtx/bundles/demo-k16-fp16")
    result = invoke("run", image, QUESTION, "--json", "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["k"] == 3


@pytest.mark.slow
def test_where_the_last_bundle_cannot_be_noted_the_export_says_so(
    home: Path, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    (home / ".local").write_text("a file in the way")
    result = invoke("export", "--model", tiny_checkpoint(), "--precision", "fp32", "--out", tmp_path / "b")
    assert result.exit_code == 0
    assert "--bundle" in result.stderr


# ---- vtx-export ------------------------------------------------------------------------------------------------------


def test_arithmetic_that_one_engine_has_is_refused_for_what_keeps_that_engine(
    tiny_checkpoint: Checkpoints, tmp_path: Path, image: Path
) -> None:
    made = bundles.export(tiny_checkpoint(), tmp_path / "bundle", (), dialects=("ort",))
    told = fails("run", image, QUESTION, "--bundle", made.folder, "--compute", "bf16")
    assert "openvino reads graphs of the 'plain' dialect" in told


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (VtxError("two\nlines"), 1, "two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory"),
    ],
)
def test_every_end_is_one_line_and_its_exit_code(error: BaseException, code: int, line: str) -> None:
    @click.command(cls=console.Command)
    def command() -> None:
        raise error

    result = CliRunner().invoke(command, [])
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1
    assert line in result.stderr


@pytest.fixture(scope="module")
def talker(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose answers take seconds."""
    folder = tiny_checkpoint(Tiny(context=16_384))
    return bundles.export(folder, tmp_path_factory.mktemp("talker") / "b", max_context=16_384).folder


def talk(talker: Path, image: Path, **options: Any) -> subprocess.Popen[bytes]:
    words = ["run", image, QUESTION, "--bundle", talker, "--threads", 1]
    return process(*words, "--ignore-eos", "--max-new-tokens", 16_000, **options)


def test_ctrl_c_during_an_answer_exits_with_130(talker: Path, image: Path) -> None:
    running = talk(talker, image)
    assert running.stdout
    assert running.stdout.read(1)
    os.killpg(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=WAIT)
    assert running.returncode == 130, stderr.decode()
    assert stderr.decode().splitlines()[-1].endswith("interrupted")
    assert b"Traceback" not in stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_an_answer_without_a_traceback(talker: Path, image: Path) -> None:
    running = talk(talker, image)
    assert running.stdout
    assert running.stderr
    assert running.stdout.read(1)
    running.stdout.close()
    stderr = running.stderr.read().decode()
    running.stderr.close()
    assert running.wait(timeout=WAIT) == 1
    assert len(stderr.splitlines()) <= 1, stderr  # the line that says what it runs on
    assert "cpu" in stderr


@pytest.mark.sampled
@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["doctor"]])
def test_a_closed_pipe_ends_a_report_without_a_traceback(bundle: Path, words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    running = process(*words, bundle, stdout=write)
    os.close(write)
    _, stderr = running.communicate(timeout=WAIT)
    assert running.returncode == 1
    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


@pytest.mark.slow
def test_a_command_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "further.py").write_text("import click\n@click.command\ndef extra():\n    'Do more.'\n")
    (tmp_path / "further-1.dist-info").mkdir()
    (tmp_path / "further-1.dist-info" / "METADATA").write_text("Name: further\nVersion: 1\n")
    (tmp_path / "further-1.dist-info" / "entry_points.txt").write_text("[vtx.commands]\nextra = further:extra\n")
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    script = "from vtx.cli import extra, main; assert main.commands['extra'] is extra; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Do more." in done.stdout
