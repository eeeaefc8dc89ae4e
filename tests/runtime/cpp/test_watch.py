"""The loop of the C++ example `camera`, by a program that makes its frames: `make cpp-sanitize` watches it, too."""

from __future__ import annotations

import json

import pytest

from tests.support.cpp import needs_cpp, output
from tests.support.exported import Models
from vtx.runtime.api.model import Model

pytestmark = needs_cpp


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


def watching(model: Model, mode: str, frames: int) -> dict[str, int]:
    found: dict[str, int] = json.loads(output("watching", model.bundle.folder, mode, str(frames)))
    return found


@pytest.mark.slow
def test_frames_of_changing_size_and_format_are_answered_as_alone_and_damaged_ones_are_told(model: Model) -> None:
    found = watching(model, "steady", 1000)
    damaged = 1000 // 25
    assert (found["frames"], found["dropped"], found["last"]) == (1000, 0, 1000)
    assert found["refused"] == found["damaged"] == damaged
    assert found["answers"] == 2 * (1000 - damaged)
    assert found["reused"] == 2 * (500 - damaged), "of each picture that came whole twice"
    assert found["different"] == 0
    assert found["late"] - found["early"] < 4096, "memory is flat"


def test_of_a_camera_that_is_100_times_too_fast_the_newest_frames_are_answered(model: Model) -> None:
    found = watching(model, "fast", 5000)
    looked_at = found["answers"] // 2
    assert found["frames"] == 5000 == looked_at + found["dropped"]
    assert found["refused"] == 0
    assert 5000 // 100 <= looked_at <= 5000 // 100 + 2
    assert (found["older"], found["last"]) == (0, 5000), "frames are in order, and the last one is answered"
