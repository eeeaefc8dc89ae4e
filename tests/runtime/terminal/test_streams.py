"""Commands whose standard streams are closed, or cannot represent every character."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The words of vtx, behind a redirection that a shell makes before Python starts.
VTX = "import sys; from vtx.cli import main; sys.argv[0] = 'vtx'; main()"
SAY = """
import click
from vtx.runtime.terminal.console import command, note, say, say_json
@command(epilog="")
@click.option("--json", "as_json", is_flag=True)
def talk(as_json):
    note("a note")
    (say_json if as_json else say)({text!r})
talk()
"""


def shell(code: str, redirection: str, *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, check=False, env=os.environ | environment)


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-8"])
def test_what_stdout_cannot_represent_is_escaped_and_json_stays_json(encoding: str) -> None:
    text = "caf\u00e9 \u6f22\u5b57 \U0001f600 \u0081"
    code = SAY.format(text=text)
    plain = shell(code, "", PYTHONIOENCODING=encoding)
    assert (plain.returncode, plain.stderr) == (0, b"a note\n")
    assert "caf" in plain.stdout.decode(encoding)
    printed = shell(code, "", "--json", PYTHONIOENCODING=encoding)
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout.decode(encoding)) == text
    if encoding == "cp1252":
        assert plain.stdout.decode(encoding) == "caf\u00e9 \\u6f22\\u5b57 \\ud83d\\ude00 \\u0081\n"


@pytest.mark.sampled
@pytest.mark.parametrize("redirection", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_command_answers_without_stderr_or_stdin(redirection: str) -> None:
    done = shell(SAY.format(text="5"), redirection)
    assert (done.returncode, done.stdout) == (0, b"5\n")


@pytest.mark.parametrize("redirection", [">&-", "<&- >&-"])
def test_without_stdout_the_answer_is_an_error_and_not_lost(redirection: str) -> None:
    done = shell(SAY.format(text="5"), redirection)
    assert done.returncode == 1
    assert b": cannot write the output (Bad file descriptor)" in done.stderr


@pytest.mark.slow
def test_a_failure_without_any_stream_keeps_its_exit_code(tmp_path: Path) -> None:
    done = shell(VTX, ">&- 2>&- <&-", "inspect", str(tmp_path / "none"))
    assert done.returncode == 1


def test_a_file_that_is_opened_does_not_become_stderr(tmp_path: Path) -> None:
    """With descriptor 2 closed the next file to be opened is descriptor 2, to which libraries write messages."""
    code = SAY.format(text="5").replace(
        "    note(", f"    import os; file = open({str(tmp_path / 'file')!r}, 'w'); os.write(2, b'noise'); note("
    )
    assert shell(code, "2>&-").returncode == 0
    assert (tmp_path / "file").read_bytes() == b""
