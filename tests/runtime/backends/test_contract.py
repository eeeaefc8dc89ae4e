"""What a graph may give: sizes that it leaves free are compared with what it was given at each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bundles import copy, cut_output
from tests.support.exported import DEVICES, THREADS, Models
from tests.support.tiny import random_image
from vtx.runtime.api.load import load
from vtx.runtime.bundle.spec.names import HIDDEN_OUT
from vtx.runtime.errors import BundleError, DeviceError

pytestmark = pytest.mark.dialects("ort", "plain")


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("graph", "rows", "tokens"), [("embed", 1, r"\d+"), ("head", 0, "1")])
def test_a_graph_that_gives_fewer_outputs_than_tokens_is_refused(
    models: Models, tmp_path: Path, device: str, graph: str, rows: int, tokens: str
) -> None:
    forged = copy(models().bundle.folder, tmp_path / "forged")
    dialect = "plain" if device == "openvino" else "ort"
    cut_output(forged, f"{graph}.{dialect}.onnx", rows)
    with pytest.raises(BundleError, match=rf"{graph}.{dialect}.onnx gives {rows} outputs for {tokens} tokens; export"):
        load(forged, device=device, threads=THREADS).open(random_image(1)).ask("red?", max_new_tokens=3)


def test_outputs_of_a_wrong_size_are_not_told_as_a_lack_of_memory(models: Models, tmp_path: Path) -> None:
    model = models()
    forged, name = copy(model.bundle.folder, tmp_path / "forged"), model.manifest.dialects["ort"].stages[0]
    cut_output(forged, name, 1, HIDDEN_OUT)
    with pytest.raises(DeviceError, match=f"onnxruntime failed in {name}: "):
        load(forged, device="cpu", threads=THREADS).open(random_image(1)).ask("red?", max_new_tokens=3)
