"""The command vtx-watch: its check, a whole run over a folder with a reload, and its end."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import bundles
from tests.support.tiny import random_image
from vtx import cli

WAIT = 120.0


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.export(tiny_checkpoint(), tmp_path_factory.mktemp("watch") / "bundle").folder


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
            assert running.wait(WAIT) == 0
        finally:
            running.kill()
