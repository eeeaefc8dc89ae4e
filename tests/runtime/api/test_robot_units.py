"""A robot's units: LeRobot's and transformers' formulas, and bins of a state as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vtx.runtime.api.robot_units import as_text, normalised, restored, width_of
from vtx.runtime.bundle.spec.action_spec import ActionSpec
from vtx.runtime.errors import BundleError


def spec(**statistics: Any) -> ActionSpec:
    sizes = {"hidden": 8, "intermediate": 8, "heads": 1, "state": 4, "width": 4, "horizon": 2, "steps": 1}
    return ActionSpec(**sizes, eps=1e-6, activation="silu", min_period=1, max_period=2, **statistics)


def test_deviations_and_ranges_are_taken_as_lerobot_takes_them() -> None:
    numbers = np.array([[1.0, -2.0, 0.5]], np.float32)
    deviations = spec(state_mean=(0.5, 1.0, 0.0), state_std=(2.0, 0.5, 0.0))
    assert width_of(deviations, "state") == 3
    wanted = (numbers - [0.5, 1.0, 0.0]) / (np.array([2.0, 0.5, 0.0]) + 1e-8)
    np.testing.assert_allclose(normalised(deviations, "state", numbers), wanted, rtol=1e-6)
    ranges = spec(actions_low=(-1.0, -4.0, 0.5), actions_high=(3.0, 0.0, 0.5))
    wanted = 2 * (numbers - [-1.0, -4.0, 0.5]) / [4.0, 4.0, 1e-8] - 1
    np.testing.assert_allclose(normalised(ranges, "actions", numbers), wanted, rtol=1e-6)
    back = restored(ranges, "actions", np.array([[-1.0, 1.0, 0.3]], np.float32))
    np.testing.assert_allclose(back, [[-1.0, 0.0, 0.5]], atol=1e-6)
    assert width_of(ranges, "state") is None


def test_bins_are_those_of_numpys_digitize_in_openpi() -> None:
    edges = np.linspace(-1, 1, 257)[:-1].astype(np.float32)
    assert as_text(edges) == " ".join(map(str, range(256)))
    assert as_text(np.nextafter(edges, np.float32(-2))) == " ".join(map(str, range(-1, 255)))
    assert as_text(np.array([-1.5, -1.0, 0.0, 0.999, 1.0, 7.0], np.float32)) == "-1 0 128 255 255 255"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_mean": (0.0,), "state_std": (1.0,), "state_low": (0.0,), "state_high": (1.0,)}, "both deviations and"),
        ({"state_low": (0.0,)}, "up to 4 low and as many high"),
        ({"state_low": (0.0,), "state_high": (float("inf"),)}, "up to 4 low and as many high"),
        ({"state_mean": (0.0,), "state_std": (-1.0,)}, "up to 4 mean and as many std"),
        ({"actions_low": (0.0,) * 5, "actions_high": (0.0,) * 5}, "up to 4 low"),
        ({"state_in": "air"}, "state_in is 'air'"),
        ({"self_every": 0}, "are not numbers from 1"),
        ({"instruction_tokens": 0}, "are not numbers from 1"),
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        spec(**fields)
