"""onnxruntime under vtx: whoever else uses it in the process finds it as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.bundles import export

USER = """
import sys
import numpy as np
import onnxruntime
import vtx

folder, other = sys.argv[1:]

def use_onnxruntime(when):
    session = onnxruntime.InferenceSession(other, providers=["CPUExecutionProvider"])
    print(when, session.run(None, {"x": np.ones(2, np.float32)})[0].tolist())

def ask(model):
    return model.ask("red?", None, vtx.Options(max_new_tokens=3, ignore_eos=True)).token_ids

use_onnxruntime("before")
model = vtx.load(folder, device="cpu", threads=2)
use_onnxruntime("loaded")
ids = ask(model)
use_onnxruntime("asked")
again = vtx.load(folder, device="cpu", threads=1)
print("alike", ask(again) == ids == ask(model))
del model, again
use_onnxruntime("after")
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


def test_other_users_of_onnxruntime_find_it_as_it_was(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = export(tiny_checkpoint(), tmp_path / "bundle", (3,)).folder
    other = write_graph_with_a_warning(tmp_path / "other.onnx")
    done = subprocess.run([sys.executable, "-c", USER, folder, other], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [f"{when} [2.0, 2.0]" for when in ("before", "loaded", "asked", "after")]
    assert done.stdout.splitlines() == [*answers[:3], "alike True", answers[3]]
    assert done.stderr.count(WARNING) == 4, "the other user's warnings are still told"
    logged = [line for line in done.stderr.splitlines() if ":onnxruntime:" in line and "device_discovery" not in line]
    assert len(logged) == 4, "and ours are not"
