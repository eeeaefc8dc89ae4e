"""onnxruntime under vtx: whoever else uses it in the process finds it as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import vtx
from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from vtx.runtime.backends.ort.cuda import RELU
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.backends.ort.library import FOLD_LARGE, LOG, SILENCE, load_onnxruntime, session_options
from vtx.runtime.host.machine import cores
from vtx.runtime.vision.tokens import TokenStates

USER = """
import sys
import numpy as np
import onnxruntime
import vtx

folder, other = sys.argv[1:]

def use(session, when):
    print(when, session.run(None, {"x": np.ones(2, np.float32)})[0].tolist())

def use_another(when):
    use(onnxruntime.InferenceSession(other, providers=["CPUExecutionProvider"]), when)

options = vtx.Options(max_new_tokens=3, ignore_eos=True)

def ask(model):
    return model.ask("red?", None, options).token_ids

use_another("before")
kept = onnxruntime.InferenceSession(other, providers=["CPUExecutionProvider"])
with vtx.load(folder, device="cpu", threads=2) as model:
    use_another("loaded")
    stream = model.open([]).stream("red?", None, options)
    next(stream)
    use_another("while answering")
    use(kept, "the one from before")
    list(stream)
    ids = stream.answer.token_ids
    with vtx.load(folder, device="cpu", threads=1) as one:
        print("threads", model.backend.threads, one.backend.threads)
        print("alike", ask(one) == ids == ask(model))
    print("alike", ask(model) == ids)
use_another("closed")
use(kept, "the one from before")
"""
WARNING = "Removing initializer 'unused'"


def write_graph_with_a_warning(path: Path) -> Path:
    """y = x + 1, with an initializer that nobody reads: onnxruntime warns of it when it loads the graph."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        "other",
        [value("x", TensorProto.FLOAT, [2])],
        [value("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.ones(2, np.float32), name) for name in ("one", "unused")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_other_users_of_onnxruntime_find_it_as_it_was(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = export(tiny_checkpoint(), tmp_path / "bundle", (3,)).folder
    other = write_graph_with_a_warning(tmp_path / "other.onnx")
    done = subprocess.run([sys.executable, "-c", USER, folder, other], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before [2.0, 2.0]", "loaded [2.0, 2.0]", "while answering [2.0, 2.0]", "the one from before [2.0, 2.0]",
        f"threads {min(2, cores())} 1",
        "alike True", "alike True", "closed [2.0, 2.0]", "the one from before [2.0, 2.0]",
    ]  # fmt: skip
    assert done.stderr.count(WARNING) == 5, "the other user's warnings are still told"
    logged = [line for line in done.stderr.splitlines() if ":onnxruntime:" in line and "device_discovery" not in line]
    assert len(logged) == 5, "and ours are not"


def test_onnxruntime_leaves_nothing_in_the_user_s_home(tmp_path: Path) -> None:
    code = "from vtx.runtime.backends.ort.library import load_onnxruntime; load_onnxruntime()"
    environment = {name: value for name, value in os.environ.items() if name not in (SILENCE, "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, check=True)
    assert [*tmp_path.rglob("*")] == []


def test_matrices_of_any_size_are_widened_at_load() -> None:
    """By default releases from 1.27 on leave those of more than 1 GiB to every run."""
    options = session_options(load_onnxruntime(), 1)
    assert options.get_session_config_entry(FOLD_LARGE[0]) == "0"


COMMAND = """
import os
import sys
import onnxruntime
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.process import owns_process
from vtx.runtime.terminal.console import command

def threads():
    return len(os.listdir("/proc/self/task"))

def load():
    options = session_options(onnxruntime, 3)
    return onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

@command(epilog="")
def count():
    first, before = load(), threads()
    second = load()
    print(owns_process(), threads() - before)

count.main([], standalone_mode=False) if sys.argv[2] == "application" else count([], standalone_mode=False)
"""


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(("process", "owned_and_threads"), [("command", "True 0"), ("application", "False 2")])
def test_sessions_share_a_pool_in_a_command_and_have_their_own_elsewhere(
    process: str, owned_and_threads: str, tmp_path: Path
) -> None:
    graph = write_graph_with_a_warning(tmp_path / "graph.onnx")
    done = subprocess.run([sys.executable, "-c", COMMAND, graph, process], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == owned_and_threads
    assert not [line for line in done.stderr.splitlines() if "SessionOptions" in line or "ignored" in line]


def test_what_a_run_reads_is_held_until_it_is_over(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases bind the memory of an array and do not keep the array."""
    bound: list[weakref.ref[Any]] = []
    import onnxruntime

    make, run = onnxruntime.OrtValue.ortvalue_from_numpy, OrtGraph.run_bound

    def value(array: Any, *memory: Any) -> Any:
        bound.append(weakref.ref(array))
        return make(array, *memory)

    def run_bound(graph: OrtGraph, binding: Any) -> None:
        assert bound
        assert all(ref() is not None for ref in bound), "an array that this run reads is gone"
        run(graph, binding)
        bound.clear()

    def as_before(binding: Any, name: str, value: Any) -> None:
        binding._iobinding.bind_ortvalue_input(name, value._ortvalue)

    folder = export(tiny_checkpoint(), tmp_path / "bundle", (3,)).folder
    monkeypatch.setattr("onnxruntime.OrtValue.ortvalue_from_numpy", value)
    with vtx.load(folder, device="cpu", threads=1) as model:
        cache = model.backend.stage(0, 64)
        bound.clear()
        monkeypatch.setattr("onnxruntime.IOBinding.bind_ortvalue_input", as_before)
        monkeypatch.setattr(OrtGraph, "run_bound", run_bound)
        rows = np.ones((5, model.manifest.model.hidden), np.float32)
        cache.append(TokenStates(rows), np.arange(5))


@pytest.mark.parametrize("asked", [False, True])
def test_messages_of_onnxruntime_are_shown_on_demand(
    asked: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG, "1" if asked else "")
    ort = load_onnxruntime()
    ort.InferenceSession(RELU, session_options(ort, 1), providers=["CPUExecutionProvider"])
    assert ("onnxruntime:" in capfd.readouterr().err) == asked
