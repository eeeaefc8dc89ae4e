"""LeRobot's policies in libvtx: the actions of the Python runtime, and its refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import ORT, export_with
from tests.support.cabi import OK, REQUEST
from tests.support.cpp import needs_cpp
from tests.support.exported import THREADS
from tests.support.families.lerobot import POLICIES, WORDS, make_policy, recorded
from tests.support.fixtures import Libraries
from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load

pytestmark = needs_cpp
SAME = 2e-5
CAMERAS = {"top": random_image(0, (80, 60)), "wrist": random_image(1, (40, 90))}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_actions_of_a_policy_are_those_of_python(opened: Libraries, policy: str, tmp_path: Path, tiny_pi: None) -> None:
    checkpoint = make_policy(tmp_path / "checkpoint", policy)
    bundle = export_with(ExportOptions(str(checkpoint), (2,), "fp32", dialects=ORT), tmp_path / "bundle").folder
    noise = np.random.default_rng(5).standard_normal((7, 5), np.float32)
    library = opened(bundle)
    with load(bundle, device="cpu", threads=THREADS) as python:
        for k in (None, 2):
            for names in (("top", "wrist"), ("wrist", "top"), ("wrist",)):
                for state in (recorded()[policy]["state"], [-9.0, 0.0, 1.0, 0.3]):
                    images = {name: CAMERAS[name] for name in names}
                    wanted = python.act(images, f"{WORDS}\n", state, k=k, noise=noise)
                    status, found, facts = library.act(
                        [*images.values()], f"{WORDS}\n", state, noise=noise, k=str(k or "none").encode(), cameras=names
                    )
                    assert status == OK, facts
                    assert_near(found, wanted, SAME * np.abs(wanted).max())
    for names, words, message in (
        (("left",), WORDS, "the pictures lack top, wrist"),
        (("top", "left"), WORDS, "hold left"),
        ((), WORDS, "1 pictures are given, and this bundle has 2 cameras"),
        (("top",), "red " * 300, "tokens, and the model was trained with"),
    ):
        pictures = [CAMERAS["top"]] * max(1, len(names))
        status, _, facts = library.act(pictures, words, np.zeros(4), noise=noise, cameras=names)
        assert status == REQUEST
        assert message in facts["error"]
