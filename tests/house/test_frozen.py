"""A program that PyInstaller freezes with the hook of the wheel: it answers, and reads a video in a confined child.

This downloads PyInstaller, so it runs only when it is asked for: `make test-extras`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.distribution import ROOT, build_wheel, run
from tests.support.video_files import write_video
from vtx.exporter.bundling.prepare import demo_checkpoint

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif("VTX_TEST_EXTRAS" not in os.environ, reason="downloads packages; `make test-extras` runs it"),
]
PROGRAM = """
import json, os, sys
bundle, picture, clip, log = sys.argv[1:5]  # a copy of the program that started again would fail here
with open(log, "a") as file:
    file.write("started\\n")
import vtx
from vtx.runtime.host.confined import confinement
from vtx.runtime.vision.frame_sampling import FrameSampling
from vtx.runtime.vision.video import load_frames, video
with vtx.load(bundle) as model, model.open(picture) as image:
    answer = image.ask("How many shapes are there?").text
frames = len(load_frames(video(clip), FrameSampling(4), lambda image: image))
print(json.dumps([answer, frames, confinement()]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, what it needs, and PyInstaller."""
    folder = tmp_path_factory.mktemp("frozen") / "env"
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    venv.create(folder)
    python = folder / "bin" / "python"
    pip_install = ("-m", "pip", "--python", python, "install")
    run(sys.executable, *pip_install, "pyinstaller", f"{wheel}[cpu,video]", cwd=folder)
    return python.parent


@pytest.mark.parametrize("form", ["--onedir", "--onefile"])
def test_a_frozen_program_answers_and_reads_a_video_in_a_confined_child(
    programs: Path, tmp_path: Path, form: str
) -> None:
    pytest.importorskip("av", reason="the [video] extra is not installed")
    bundle = export(demo_checkpoint(), tmp_path / "demo", (16,), "fp16").folder
    clip, log = write_video(tmp_path / "clip.mp4", frames=12), tmp_path / "log"
    (tmp_path / "kiosk.py").write_text(PROGRAM)
    env = {"HOME": str(tmp_path), "PATH": os.pathsep.join((str(programs), os.defpath))}
    run(programs / "pyinstaller", "--noconfirm", form, "kiosk.py", cwd=tmp_path, env=env)
    frozen = tmp_path / "dist" / "kiosk"
    shutil.rmtree(tmp_path / "build")
    said = run(
        frozen / "kiosk" if frozen.is_dir() else frozen,
        bundle,
        ROOT / "examples/scene-1.jpg",
        clip,
        log,
        cwd=tmp_path,
        env=env,
    )
    answer, frames, restrictions = json.loads(said)
    assert (answer, frames) == ("5", 4)
    assert "limits" in restrictions
    assert log.read_text() == "started\n"
