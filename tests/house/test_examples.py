"""The samples for applications run, and do what their first lines say."""

from __future__ import annotations

import csv
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vtx
from tests.support.bundles import ORT, export, export_with
from tests.support.families.pi0 import TinyPi0, make_pi0
from tests.support.gated import WAIT
from tests.support.json_files import write_json
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import DEMO, ExportOptions

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "examples" / "python"
SCENES = sorted((ROOT / "examples").glob("scene-*.jpg"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Path(DEMO), tmp_path_factory.mktemp("examples") / "demo", (16,), "fp16").folder


def environment(*paths: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "src", *paths]))}


def run(name: str, *arguments: Any) -> str:
    command = [sys.executable, "-W", "error", str(SAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_the_camera_answers_about_its_newest_frame(bundle: Path, tmp_path: Path) -> None:
    for scene in SCENES:
        shutil.copy(scene, tmp_path)
    lines = run("camera.py", bundle, tmp_path, "How many shapes are there?", "--frames", len(SCENES)).splitlines()
    names = [line.partition(": ")[0] for line in lines]
    assert names == sorted(set(names))
    assert names[-1] == SCENES[-1].name
    assert lines[-1].partition(": ")[2]


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, tiny = tmp_path_factory.mktemp("robot"), TinyPi0(statistics=False, steps=2)
    checkpoint = make_pi0(made / "checkpoint", tiny)
    options = ExportOptions(str(checkpoint), (3,), "fp32", dialects=ORT, cameras=("base", "wrist"))
    return export_with(options, made / "bundle").folder


@pytest.mark.slow
def test_the_control_loop_acts_on_each_cameras_newest_frame(robot: Path, tmp_path: Path) -> None:
    for camera in ("base", "wrist"):
        (tmp_path / camera).mkdir()
        shutil.copy(SCENES[0], tmp_path / camera)
    write_json(tmp_path / "state.json", [0.0] * TinyPi0().state)
    cameras = [f"{camera}={tmp_path / camera}" for camera in ("wrist", "base")]
    arguments = ("--hz", 10, "--steps", 4, "--k", 3, "--normalized")
    *sent, last = run("control_loop.py", robot, tmp_path / "state.json", "red?", *cameras, *arguments).splitlines()
    missed = re.fullmatch(r"(\d) of 4 steps missed", last)
    assert missed is not None
    assert len(sent) == 4 - int(missed[1])


def test_the_control_loop_drops_late_actions_and_counts_the_steps_they_took(robot: Path) -> None:
    loop = runpy.run_path(str(SAMPLES / "control_loop.py"))
    newest, time, used, sent = loop["Newest"](("base", "wrist")), [0.0], list[Any](), list[Any]()
    frames = [random_image(number) for number in range(11)]
    seconds = [0.05, 0.25, 0.02, 0.12, 0.0]  # of each answer; the second and the fourth are late at 10 steps a second

    class Slow:
        """A model whose answers take that long by the clock of the test, while cameras go on."""

        def act(self, images: Any, *arguments: Any, deadline_ms: float, **options: Any) -> Any:
            used.append(images["base"])
            newest.put("base", frames[2 * len(used) - 1])
            newest.put("base", frames[2 * len(used)])  # the one before is never seen
            taken = seconds[len(used) - 1]
            time[0] += taken
            if 1000 * taken >= deadline_ms:
                raise vtx.DeadlineError("late")
            return model.act(images, *arguments, **options)

    newest.put("wrist", frames[0])
    newest.put("base", frames[0])
    with vtx.load(robot, device="cpu", threads=1) as model:
        missed = loop["control"](
            Slow(), newest, "red?", lambda: np.zeros(TinyPi0().state), lambda *step: sent.append(step), hz=10, steps=6,
            now=lambda: time[0], wait=lambda left: time.__setitem__(0, time[0] + left), normalized=True, seed=1,
        )  # fmt: skip
        assert [step for step, _ in sent] == [0, 3, 5]
        assert missed == 3
        assert used == frames[0:10:2]
        for (_, action), base in zip(sent, (frames[0], frames[4], frames[8]), strict=True):
            own = model.act([base, frames[0]], "red?", np.zeros(TinyPi0().state), normalized=True, seed=1)
            np.testing.assert_array_equal(action, own[0])


@pytest.mark.slow
def test_threads_share_a_model(bundle: Path) -> None:
    lines = run("threads.py", bundle, "How many shapes are there?", *SCENES).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [scene.name for scene in SCENES]
    assert all("with all image tokens" in line for line in lines)


def test_a_batch_is_a_table(bundle: Path) -> None:
    rows = list(csv.reader(run("batch.py", bundle, ROOT / "examples", "How many shapes are there?").splitlines()))
    assert rows[0] == ["image", "answer", "first token ms"]
    assert [row[0] for row in rows[1:]] == [scene.name for scene in SCENES]
    assert all(row[1] and float(row[2]) > 0 for row in rows[1:])


@pytest.mark.slow
def test_the_server_answers_survives_a_client_that_leaves_and_stops_with_one_there(bundle: Path) -> None:
    command = [sys.executable, str(SAMPLES / "async_server.py"), str(bundle), str(SCENES[0]), "--port", "0"]
    server = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(" ")[2])
        with socket.create_connection(("localhost", port), WAIT) as rude:
            rude.sendall(b"How many shapes are there?\n")
        answers = []
        with socket.create_connection(("localhost", port), WAIT) as client, client.makefile("rw") as lines:
            for question in ("How many shapes are there?", " "):
                lines.write(question + "\n")
                lines.flush()
                answers.append(lines.readline())
            server.send_signal(signal.SIGINT)  # with a client still there
            out, errors = server.communicate(timeout=WAIT)
        assert answers[0].strip()
        assert answers[1].startswith("error: the question is empty")
    finally:
        server.kill()
    assert (out, errors, server.returncode) == ("stopped\n", "", 0)


@pytest.mark.slow
def test_an_installed_package_brings_a_policy(tmp_path: Path, tiny_checkpoint: Any) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(SAMPLES / "vtx-policy-every", source)
    install = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        site,
        source,
    ]
    subprocess.run([sys.executable, *map(str, install)], check=True, timeout=WAIT, capture_output=True)
    script = f"""
import numpy as np
import vtx

bundle = vtx.export({str(tiny_checkpoint())!r}, {str(tmp_path / "bundle")!r}, precision="fp32", reduce="every:n=2")
with vtx.load(bundle.folder, device="cpu", threads=1) as model, model.open(np.zeros((64, 64, 3), np.uint8)) as image:
    for n in (2, 4):
        print(image.ask("red?", reduce=f"every:n={{n}}", max_new_tokens=1).stats.vision_tokens_kept)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(site), capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str((16, 16) + (8,) * 6), str((16, 16) + (4,) * 6)]


def broken(folder: Path, code: str) -> Path:
    """A site directory with a package that announces a policy `broken`."""
    facts = folder / "broken-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[vtx.policies]\nbroken = broken_policy:Broken\n")
    (folder / "broken_policy.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "the policy 'broken' of broken cannot be loaded (ZeroDivisionError: division by zero)"),
        ("class Broken: pass", "broken announces a policy 'broken' and registers none by that name"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_named_with_its_package(tmp_path: Path, code: str, message: str) -> None:
    script = """
import vtx
from vtx.runtime.policies import parse
try:
    parse("fastv")
except vtx.RequestError as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(broken(tmp_path, code)), capture_output=True, text=True,
        timeout=WAIT, check=True,
    )  # fmt: skip
    assert message in done.stdout
