"""Videos of models with images of any size, on the stand-in of TensorRT: pairs of frames go through the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import export_all
from tests.support.engines import build_for, open_model
from tests.support.exported import THREADS
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import Gpu
from tests.support.tiny import Tiny, random_video
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.vision.video import video


@pytest.mark.parametrize(
    ("tiny", "dialect"),
    [(QWEN2, "trt"), (QWEN25, "trt"), (QWEN25, "trt10"), (QWEN3, "trt")],
    ids=lambda given: given if isinstance(given, str) else given.family,
)
def test_videos_are_answered_as_on_onnxruntime(
    tiny: Tiny,
    dialect: str,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    device: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "bundle"
    export_all(tiny_checkpoint(tiny), folder, (2,))
    build_for(dialect, folder, monkeypatch)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    shown = [video(random_video(1, 20, (90, 60)), frames=4, fps=30), video(random_video(0, 9, (120, 50)), frames=3)]
    options = Options(6, ignore_eos=True, logprobs=True)
    for given in shown:
        with ours.open(given) as mine, reference.open(given) as theirs:
            for k, question in ((None, "red?"), (2, "How many circle shapes are there?")):
                got, want = (talk.ask(question, k or "none", options) for talk in (mine, theirs))
                assert got.token_ids == want.token_ids
                np.testing.assert_allclose(got.logprobs or (), want.logprobs or (1,), atol=1e-4)
                assert got.stats.kv_slots == want.stats.kv_slots
