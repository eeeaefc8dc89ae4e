"""Commands run in this process or in one of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from vtx import cli


def invoke(command: str, *words: object, data: bytes | None = None) -> Result:
    """Run a command in this process; anything that is not an exit comes out as it is."""
    runner = CliRunner()
    return runner.invoke(getattr(cli, command), [str(w) for w in words], input=data, catch_exceptions=False)


def fails(command: str, *words: object, code: int = 1) -> str:
    """The one line on stderr of a command that fails with `code`."""
    result = invoke(command, *words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def process(*words: object, **options: Any) -> subprocess.Popen[bytes]:
    """A command in a process and a process group of its own; `words` as after `vtx`."""
    code = "import sys; from vtx.cli import main; sys.argv[0] = 'vtx'; main()"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], **{**streams, "start_new_session": True, **options}
    )
