"""Nothing that a file's author chose reaches the terminal as a command to it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from vtx import cli
from vtx.runtime.errors import BundleError, VtxError, printable
from vtx.runtime.terminal import console

ATTACK = "\x1b]0;title\x07\x1b[31m\x9b2J\x08\x7f\u202e\r\ud800"
COMMANDS = set("\x1b\x07\x9b\x08\x7f\u202e\r\ud800")


def test_what_a_terminal_would_obey_is_spelt_out() -> None:
    assert printable(ATTACK).isprintable()
    assert printable("a\x1b[31mb\r\u202e") == r"a\x1b[31mb\r\u202e"
    assert printable("two\nlines\tof größe 日本 😀\u00a0") == "two\nlines\tof größe 日本 😀\u00a0"


@pytest.mark.parametrize("kind", [VtxError, BundleError])
def test_errors_are_printable_whatever_they_quote(kind: type[VtxError]) -> None:
    assert not COMMANDS & set(str(kind(f"tensor {ATTACK} is missing")))


def test_notes_and_tables_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    console.note(ATTACK)
    console.table(ATTACK, ["a"], [[ATTACK]])
    console.table("title", ["a"], [[ATTACK]])
    shown = capsys.readouterr()
    assert not COMMANDS & set(shown.out + shown.err)
    assert r"\x1b[31m" in shown.out


def test_answers_reach_a_terminal_without_commands_and_a_pipe_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.say("a\u202eb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console.say("a\x1b[2Jb\n")
    assert capsys.readouterr().out == "a\u202eb\na\\x1b[2Jb\n\n"


def test_a_checkpoint_s_names_are_printed_without_commands(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "\x1b[31mred"))
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "model_type": "\x1b[2J"})
    done = CliRunner().invoke(cli.export, ["--model", str(folder), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "\x1b" not in done.stderr
    (folder / "config.json").unlink()
    done = CliRunner().invoke(cli.export, ["--model", str(folder)])
    assert r"\x1b[31mred" in done.stderr
    assert "\x1b" not in done.stderr
