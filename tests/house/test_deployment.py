"""The unit of systemd, the compose file and the Dockerfile: their commands exist, and the unit's do what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.serving import WAIT
from tests.support.tiny import Tiny
from vtx.commands.serve import OTHER_FILES, serve

ROOT = Path(__file__).parents[2]
UNIT, COMPOSE, IMAGE = (ROOT / "docker" / name for name in ("vtx-serve.service", "compose.yaml", "cpu.Dockerfile"))
PROGRAM = "import sys; from vtx.cli import serve; sys.argv[0] = 'vtx-serve'; serve()"
GRAPH_SECONDS = 10  # for a run of a graph to end, after --grace


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    unit = RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    return dict(unit["Service"])


def options(words: list[str]) -> dict[str, Any]:
    """The options of vtx-serve that these words are; a usage error fails the test."""
    return serve.make_context("vtx-serve", list(words)).params


def commands(stage: str) -> tuple[str, list[str]]:
    """What a stage of the Dockerfile is made from, and its ENTRYPOINT."""
    for text in re.split(r"^FROM ", IMAGE.read_text(), flags=re.MULTILINE)[1:]:
        head, _, body = text.partition("\n")
        source, _, name = head.partition(" AS ")
        if name == stage:
            return source, json.loads(re.findall(r"^ENTRYPOINT (.*)", body, re.MULTILINE)[0])
    raise AssertionError(f"there is no stage {stage}")


def open_files() -> int:
    """Those that a server must be allowed."""
    reason = "needs vtx-edge[serve]"
    protocol = pytest.importorskip("vtx.runtime.server.protocol", reason=reason, exc_type=ModuleNotFoundError)
    return int(protocol.CONNECTIONS + OTHER_FILES)


CAMERA = ROOT / "examples/cpp/vtx-camera.service"


@pytest.mark.parametrize("unit", [UNIT, CAMERA], ids=lambda unit: unit.stem)
def test_systemd_finds_no_fault_with_the_unit(unit: Path, tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze")
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    (tmp_path / unit.name).write_text(text)
    found = subprocess.run([analyze, "verify", tmp_path / unit.name], capture_output=True, text=True, check=False)
    assert (found.returncode, [line for line in found.stderr.splitlines() if unit.name in line]) == (0, [])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_the_commands_of_the_unit_start_reload_and_stop_a_server(
    service: dict[str, str], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Under a socket as systemd gives it: it is told of the start, of signs of life, and of the end."""
    pytest.importorskip("uvicorn", reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)
    bundle = export(tiny_checkpoint(Tiny()), tmp_path / "bundle", (3,), "fp32").folder
    (tmp_path / "keys").write_text("secret\n")
    words = shlex.split(service["ExecStart"].replace("%d", str(tmp_path)).replace("/srv/vtx/model", str(bundle)))
    assert options(words[1:])["grace"] + GRAPH_SECONDS < int(service["TimeoutStopSec"])
    assert int(service["LimitNOFILE"]) >= open_files()
    assert re.fullmatch(r"\d+%", service["MemoryMax"])
    assert int(service["WatchdogSec"]) > 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(WAIT)
        of_systemd = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words[1:], "--port", "0", "--device", "cpu"], stderr=subprocess.PIPE,
            text=True, env={**os.environ, **of_systemd},
        )  # fmt: skip
        assert process.stderr is not None
        try:
            assert told.recv(100) == b"READY=1"
            assert told.recv(100) == b"WATCHDOG=1"
            reload = service["ExecReload"].replace("$MAINPID", str(process.pid))
            subprocess.run(shlex.split(reload), check=True)
            while "model is unchanged" not in (line := process.stderr.readline()):
                assert line, "the server has ended"
            process.send_signal(signal.SIGTERM)
            while (state := told.recv(100)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"
            assert process.wait(WAIT) in (0, -signal.SIGTERM), "systemd takes either for a clean end"
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


def test_the_image_s_server_takes_the_command_of_the_compose_file() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML", exc_type=ModuleNotFoundError)
    vtx = yaml.safe_load(COMPOSE.read_text())["services"]["vtx"]
    build = vtx["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == IMAGE
    source, entrypoint = commands(build["target"])
    assert (source, entrypoint[:3]) == ("runtime", ["tini", "--", "vtx-serve"])
    assert re.search(r"^RUN .*apt-get install .*\btini\b", IMAGE.read_text(), re.MULTILINE), "its init is in it"
    found = options([*entrypoint[3:], *vtx["command"]])
    assert vtx["ulimits"]["nofile"] >= open_files()
    assert re.fullmatch(r"\$\{MEMORY:-\d+g\}", vtx["mem_limit"])
    assert found["grace"] + GRAPH_SECONDS < int(vtx["stop_grace_period"].removesuffix("s"))
    (port,) = vtx["ports"]
    assert port == f"127.0.0.1:8000:{found['port']}"
    assert re.search(r"^ARG EXTRAS=.*\bserve\b", IMAGE.read_text(), re.MULTILINE), "the server's packages are in it"
    assert f":{found['port']}/livez" in IMAGE.read_text()
    (volume,) = vtx["volumes"]
    assert volume.endswith(":/bundle:ro")
    assert any(bundle.endswith("=/bundle") for bundle in found["bundles"])
