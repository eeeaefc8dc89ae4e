"""Notes on a terminal wrap at words, and come every so often where there is none; a preface is shown once a day."""

from __future__ import annotations

import io
import sys
import time
from datetime import date
from pathlib import Path

import pytest

from vtx.runtime.terminal import console, last

LONG = "arithmetic: bf16 kept 40 of 40 answers; int8 kept 12 of 40 answers; used by default: bf16-something"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_note_wraps_at_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    console.note(f"first\n           {LONG}")
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "first"
    assert lines[1].startswith("           arithmetic:")
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[1:]).split()) == LONG


def test_a_line_of_a_report_wraps_on_a_terminal_and_an_answer_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    console.say(LONG, line=False)
    console.say("")
    assert terminal.getvalue() == f"{LONG}\n"
    console.say(LONG)
    assert max(map(len, terminal.getvalue().splitlines()[1:])) <= 40


def test_a_note_in_a_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.note(LONG)
    assert capsys.readouterr().err == f"{LONG}\n"


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LINE_EVERY", 0.01)
    with console.bar(in_bytes=("weights",)) as report:
        report("weights", 1_000_000, 4_000_000)
        text, end = "", time.monotonic() + 60
        while "weights: 1 MB of 4 MB; " not in text and time.monotonic() < end:
            time.sleep(0.02)
            text += capsys.readouterr().err
    assert "weights: 1 MB of 4 MB; " in text
    assert " so far\n" in text


def test_a_preface_is_shown_once_a_day_on_a_terminal_and_always_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert [last.first_today("one"), last.first_today("one")] == [True, True]  # pytest's stderr is no terminal
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert [last.first_today(text) for text in ("one", "two", "one", "two")] == [True, True, False, False]

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:  # type: ignore[override]
            return date(2999, 1, 1)

    monkeypatch.setattr(last, "date", Tomorrow)
    assert [last.first_today("one"), last.first_today("one")] == [True, False]


def test_a_state_that_cannot_be_written_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert [last.first_today("one"), last.first_today("one")] == [True, True]
