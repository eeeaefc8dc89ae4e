"""The command vtx-watch: its check, a whole run over a folder with a reload, and its end."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.tiny import random_image
from vtx import cli

WAIT = 120.0


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def write(config: Path, *questions: str, more: str = "") -> None:
    (config.parent / "frames").mkdir(exist_ok=True)
    asked = "".join(f'[[source.question]]\nname = "{name}"\nask = "red?"\nmax_new_tokens = 2\n' for name in questions)
    config.write_text(f'{more}[[source]]\nname = "s"\nfolder = "frames"\n{asked}')


def picture(folder: Path, seed: int) -> None:
    hidden = folder / ".new.png"
    random_image(seed, (60, 60)).save(hidden)
    hidden.rename(folder / f"{seed}.png")


def test_a_check_asks_nothing_and_names_the_source_without_frames(bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "watch.toml"
    write(config, "a")
    picture(tmp_path / "frames", 1)
    arguments = [str(bundle), str(config), "--check", "--device", "cpu"]
    done = CliRunner().invoke(cli.watch, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "60x60" in done.output
    config.write_text(config.read_text().replace('"frames"', '"none"'))
    done = CliRunner().invoke(cli.watch, arguments, catch_exceptions=False)
    assert done.exit_code == 1
    assert "No such file or directory" in done.output
    assert "1 of 1 sources give no frame" in done.output
    config.write_text(config.read_text().replace("max_new_tokens = 2", "k = 77\nmax_new_tokens = 2"))
    done = CliRunner().invoke(cli.watch, arguments, catch_exceptions=False)
    assert done.exit_code == 1
    assert "source s, question a: " in done.output


@pytest.mark.slow
def test_events_come_as_frames_do_a_reload_is_taken_over_and_sigterm_ends_it(bundle: Path, tmp_path: Path) -> None:
    config, frames = tmp_path / "watch.toml", tmp_path / "frames"
    write(config, "a")
    picture(frames, 1)
    code = "import sys; from vtx.start import watch; watch(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(bundle), str(config), "--device", "cpu", "--threads", "1"]
    lines = queue.Queue[dict[str, Any]]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        output = running.stdout
        threading.Thread(target=lambda: [lines.put(json.loads(line)) for line in output], daemon=True).start()

        def event(**wanted: Any) -> dict[str, Any]:
            while True:
                got = lines.get(timeout=WAIT)
                if wanted.items() <= got.items():
                    return got

        try:
            assert event(event="answer")["frame"] == 1
            picture(frames, 2)
            assert event(event="answer")["question"] == "a"
            write(config, "a", "b")
            os.kill(running.pid, signal.SIGHUP)
            event(event="config", state="reloaded")
            picture(frames, 3)
            event(event="answer", question="b")
            config.write_text("[[source]")
            os.kill(running.pid, signal.SIGHUP)
            assert "is not TOML" in event(event="config", state="refused")["error"]
            running.send_signal(signal.SIGTERM)
            assert event(event="status")["answers"] >= 4
            assert running.wait(WAIT) == 143
        finally:
            running.kill()


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it(bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "watch.toml"
    write(config, "a", more="status = 0.1\n")
    code = "import sys; from vtx.start import watch; watch(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(bundle), str(config), "--device", "cpu", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            running.stdout.readline()
            running.stdout.close()
            assert running.wait(WAIT) == 0, running.stderr and running.stderr.read()
        finally:
            running.kill()


@pytest.mark.slow
def test_the_page_shows_the_pictures_of_a_run_and_other_machines_need_a_key(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)
    monkeypatch.delenv("VTX_API_KEY", raising=False)
    config = tmp_path / "watch.toml"
    write(config, "a")
    picture(tmp_path / "frames", 1)
    refused = CliRunner().invoke(cli.watch, [str(bundle), str(config), "--page", "0", "--host", "0.0.0.0"])
    assert refused.exit_code == 1
    assert "--host 0.0.0.0 shows the pictures to other machines; set VTX_API_KEY" in refused.output
    code = "import sys; from vtx.start import watch; watch(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(bundle), str(config), "--device", "cpu", "--threads", "1", "--page", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            url = next(line for line in running.stderr if "the page is at" in line).split()[-1]
            assert json.loads(running.stdout.readline())["event"] == "source"
            with urlopen(url + "pictures/s", timeout=WAIT) as shown:
                assert Image.open(BytesIO(shown.read())).size == (60, 60)
            with urlopen(url + "events", timeout=WAIT) as events:
                first = json.loads(events.readline().removeprefix(b"data: "))
                assert [source["name"] for source in first["sources"]] == ["s"]
                running.send_signal(signal.SIGTERM)  # with a reader there
                assert running.wait(WAIT) == 143
        finally:
            running.kill()
