"""vtx-serve as a program: it says where it listens, answers, and ends when it is told to."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.bundles import export
from tests.support.serving import Served, asking, user
from tests.support.tiny import Tiny
from vtx.cli import serve

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Path:
    return export(tiny_checkpoint(Tiny()), tmp_path_factory.mktemp("serve") / "tiny", (3,), "fp32").folder


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(bundle: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-c", "from vtx.cli import serve; serve()", "--bundle", str(bundle), "--port", "0"]
    with subprocess.Popen(
        [*command, "--threads", "1", "--fit", "squash"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            where = re.search(r"serving tiny at http://127\.0\.0\.1:(\d+)/", line)
            assert where, line
            served = Served(int(where[1]), None)  # type: ignore[arg-type]
            [described] = served.request("GET", "/v1/models").json["data"]
            assert described["vtx"]["image"]["fit"] == "squash"
            assert served.chat(asking(user("red?"), k=3)).status == 200
            process.send_signal(end)
            rest = process.stderr.read()
            assert process.wait() in (0, 130, -end)
            assert "Traceback" not in rest
        finally:
            process.kill()


def test_a_port_that_is_taken_is_told_in_one_line(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(serve, ["--bundle", str(bundle), "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert "choose another --port" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--compute", "bf16", "--device", "cpu"), "cpu computes in f32, not bf16"),
        (("--max-tiles", "2"), "max_tiles has no effect here"),
    ],
)
def test_what_a_further_bundle_cannot_do_is_told_at_the_start(
    bundle: Path, tmp_path: Path, tiny_checkpoint: Callable[..., Path], words: tuple[str, ...], told: str
) -> None:
    tiles = export(tiny_checkpoint(Tiny(family="llava_next", layers=2)), tmp_path / "tiles", (), "fp32").folder
    done = CliRunner().invoke(serve, ["--bundle", str(tiles), "--bundle", f"second={bundle}", "--port", "0", *words])
    assert done.exit_code == 1
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert "second: " in done.stderr or "--compute" in words


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--memory", "nan"), 2, "'--memory': nan is not a number from 0 to 1,000,000"),
        (("--kv-cache", "inf"), 2, "'--kv-cache': inf"),
        (("--timeout", "-1"), 2, "'--timeout': -1.0"),
        (("--max-batch", "0"), 2, "'--max-batch'"),
        (("--image-host", "https://pictures.example.org"), 1, "is not the name of a host"),
    ],
)
def test_numbers_and_hosts_that_are_none_are_told_by_the_option(
    bundle: Path, words: tuple[str, str], code: int, told: str
) -> None:
    done = CliRunner().invoke(serve, ["--bundle", str(bundle), "--port", "0", *words])
    assert (done.exit_code, done.exception is None or isinstance(done.exception, SystemExit)) == (code, True)
    assert told in done.stderr
    assert "serving" not in done.stderr


def test_a_key_with_spaces_around_it_is_refused(bundle: Path) -> None:
    done = CliRunner().invoke(serve, ["--bundle", str(bundle)], env={"VTX_API_KEY": "secret "})
    assert done.exit_code == 1
    assert "VTX_API_KEY must be" in done.stderr
