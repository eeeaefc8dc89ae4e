"""LeRobot's policies: actions of its own code, recorded with the files that it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import ORT, export_with
from tests.support.exported import THREADS
from tests.support.families.lerobot import POLICIES, WORDS, make_policy, recorded, tiny_pi
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.chunks import SCHEDULES, Continuation
from vtx.runtime.api.load import load
from vtx.runtime.api.robot_units import restored
from vtx.runtime.report.golden import check_golden

__all__ = ["tiny_pi"]
TOLERANCE = 1e-4
WIDEST = 3.0  # deviation of an action in its own units
KS = (2, 4)


def pictures() -> dict[str, Image.Image]:
    return {"top": random_image(0, (80, 60)), "wrist": random_image(1, (40, 90))}


def noise() -> Any:
    return np.random.default_rng(5).standard_normal((7, 5), np.float32)


def export_policy(folder: Path, policy: str, ks: tuple[int, ...] = KS) -> Path:
    checkpoint = make_policy(folder / "checkpoint", policy)
    options = ExportOptions(str(checkpoint), ks, "fp32", dialects=(*ORT, "plain"))
    return export_with(options, folder / "bundle").folder


@pytest.mark.parametrize("policy", POLICIES)
def test_actions_are_those_of_lerobot(policy: str, tmp_path: Path, tiny_pi: None) -> None:
    bundle = export_policy(tmp_path, policy)
    wanted = recorded()[policy]
    with load(bundle, device="cpu", threads=THREADS) as model:
        assert model.manifest.action.cameras == ("top", "wrist")
        for name, actions in wanted["actions"].items():
            k = int(name) if name.isdecimal() else None
            images = {"wrist": pictures()["wrist"]} if name == "wrist" else pictures()
            found = model.act(images, WORDS, wanted["state"], k=k, noise=noise())
            np.testing.assert_allclose(found, actions, atol=TOLERANCE * WIDEST, rtol=0)
        for schedule in SCHEDULES:
            after = Continuation(wanted["previous"], 2, 5, schedule)
            # LeRobot's own code takes what is left in normalised units
            actor = model.actor
            after = Continuation(restored(actor._spec, "actions", np.array(after.left, np.float32)), 2, 5, schedule)
            found = model.act(pictures(), WORDS, wanted["state"], k=None, noise=noise(), after=after)
            np.testing.assert_allclose(found, wanted["chunks"][schedule.upper()], atol=TOLERANCE * WIDEST, rtol=0)
        assert all(check.passed for check in check_golden(model)), list(check_golden(model))
