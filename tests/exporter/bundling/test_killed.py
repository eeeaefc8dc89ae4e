"""A bundle is complete or absent, whoever else exports to the same place, and at whatever moment one is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.exporting import is_whole, names, opens, plan, run
from tests.support.fixtures import Checkpoints
from tests.support.gated import WAIT
from tests.support.tiny import Tiny
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import ExportError

# ---- two exports at once ---------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("force", [False, True])
def test_of_two_exports_to_one_place_the_result_is_one_whole_bundle(
    tiny_checkpoint: Checkpoints, tmp_path: Path, force: bool
) -> None:
    plans, meet = [plan(tiny_checkpoint(), (k,)) for k in (3, 5)], threading.Barrier(2, timeout=WAIT)
    won: list[int] = []
    lost: list[BaseException] = []

    def export(number: int) -> None:
        def together(phase: str, done: int, total: int) -> None:
            if phase == "reference" and done == 0:
                meet.wait()

        try:
            run(plans[number], tmp_path / "b", force=force, report=together)
            won.append(number)
        except BaseException as e:
            lost.append(e)

    threads = [threading.Thread(target=export, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won
    assert all(type(e) is ExportError for e in lost), lost
    if not force:
        assert len(lost) == 1
        assert "another export" in str(lost[0])
        assert Bundle.open(tmp_path / "b").manifest.variants == plans[won[0]].ks
    assert names(tmp_path) == ["b"]
    assert is_whole(tmp_path / "b")


# ---- killed ----------------------------------------------------------------------------------------------------------

# One process imports everything once; for each line on its stdin it forks a child that runs the command. The child
# counts its own function calls and sends itself a signal at the one that it was told: moments that no load can shift.
FORKER = """
import os, sys
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
import torch, transformers
torch.set_num_threads(1)
from transformers import LlavaConfig, AutoTokenizer, PreTrainedTokenizerFast
import vtx.exporter.bundling.export, vtx.exporter.reference.golden, vtx.exporter.reference.model
from vtx.cli import export

def child(signal, moment, *words):
    calls, null, answer = 0, os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.setsid(), os.dup2(null, 1), os.dup2(null, 2)

    def step(*_):
        nonlocal calls
        calls += 1
        if calls == int(moment):
            os.kill(os.getpid(), int(signal))

    sys.setprofile(step)
    try:
        export.main(words)
    except SystemExit as e:
        sys.setprofile(None)
        os.write(answer, b"%d " % calls)
        os._exit(e.code or 0)

try:
    export.main(sys.argv[1:])  # so that a child need not import what is imported late
except SystemExit as e:
    assert not e.code
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        child(*line.split("\\t")[:-1])
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Exporter:
    """Runs `vtx-export` in processes that stop themselves, without their three seconds of imports."""

    def __init__(self, checkpoint: Path, home: Path) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORKER, "--model", checkpoint, "--dialect", "ort",
             "--out", home / "first"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def __call__(self, *words: object, stop: int = signal.SIGKILL, at: int = 0) -> tuple[int, int]:
        """The exit status, negative for a signal, and the calls made; at call `at` it sends itself `stop`."""
        assert self._process.stdin
        assert self._process.stdout
        print(int(stop), at, *words, "", sep="\t", file=self._process.stdin, flush=True)
        *calls, status = self._process.stdout.readline().split()
        return int(status), int(calls[0]) if calls else 0

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def exporter(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runner = Exporter(tiny_checkpoint(), tmp_path_factory.mktemp("home"))
    yield runner
    runner.close()


@pytest.mark.slow
def test_killed_at_random_moments_an_export_leaves_nothing_that_loads(
    tiny_checkpoint: Checkpoints, tmp_path: Path, exporter: Exporter
) -> None:
    out = tmp_path / "b"
    checkpoint = tiny_checkpoint(Tiny(dtype="bfloat16", shards=3))
    words = ["--model", checkpoint, "--dialect", "ort", "--k", "3,5", "--precision", "fp16", "--out", out]
    status, calls = exporter(*words)
    assert status == 0
    shutil.rmtree(out)
    moments, left = random.Random(0), 0
    for number in range(10):
        status, _ = exporter(*words, at=int(calls * (number + moments.random()) / 10))
        assert status in (0, -signal.SIGKILL)
        hidden = [path for path in tmp_path.iterdir() if path != out]
        assert len(hidden) <= 1, "this export did not remove what the one before had left"
        left += len(hidden)
        assert not any(opens(path) for path in hidden if not (path / "vtx.json").exists())
        if out.exists():
            assert is_whole(out)
            shutil.rmtree(out)
    assert left >= 2
    assert exporter(*words)[0] == 0
    assert names(tmp_path) == ["b"]
    assert is_whole(out)


@pytest.mark.slow
def test_killed_in_its_last_moments_an_export_leaves_a_whole_bundle_old_or_new(
    tiny_checkpoint: Checkpoints, tmp_path: Path, exporter: Exporter
) -> None:
    """From the first checksum on there are some hundred calls; what is hidden then is whole once it has a manifest."""
    out = tmp_path / "b"
    words = ["--model", tiny_checkpoint(), "--dialect", "ort", "--precision", "fp32", "--force", "--out", out, "--k"]
    _, calls = exporter(*words, "3")
    seen: set[tuple[int, ...]] = set()
    for number in range(5):
        exporter(*words, "5", at=int(calls * (0.86 + 0.14 * number / 5)))
        found = [path for path in tmp_path.iterdir() if (path / "vtx.json").exists()]
        assert found
        assert all(map(is_whole, found))
        if out.exists():
            seen.add(Bundle.open(out).manifest.variants)
    assert seen <= {(3,), (5,)}
    exporter(*words, "3")
    assert names(tmp_path) == ["b"]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_an_export_and_leaves_at_most_a_hidden_folder_to_go_on_from(
    tiny_checkpoint: Checkpoints, tmp_path: Path, exporter: Exporter, sent: int, status: int
) -> None:
    out = tmp_path / "b"
    words = ["--model", tiny_checkpoint(Tiny(dtype="bfloat16")), "--dialect", "ort", "--out", out]
    _, calls = exporter(*words)
    shutil.rmtree(out)
    for share in (0.05, 0.35, 0.65) if sent == signal.SIGTERM else (0.2, 0.5, 0.8):
        assert exporter(*words, stop=sent, at=int(calls * share))[0] == status, share
        assert not out.exists()
        assert len(names(tmp_path)) <= 1
        assert not any(opens(path) for path in tmp_path.iterdir())
    assert exporter(*words)[0] == 0
    assert names(tmp_path) == ["b"]
    assert is_whole(out)


def test_the_directory_of_a_running_export_is_not_taken_for_a_killed_one_s(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def second(phase: str, done: int, total: int) -> None:
        if phase == "reference" and done == 0:
            run(plan(tiny_checkpoint(), (5,)), tmp_path / "b")
            seen.append(names(tmp_path))

    with pytest.raises(ExportError, match="another export"):
        run(plan(tiny_checkpoint(), (3,)), tmp_path / "b", report=second)
    assert len(seen[0]) == 2
    assert names(tmp_path) == ["b"]
    assert Bundle.open(tmp_path / "b").manifest.variants == (5,)
