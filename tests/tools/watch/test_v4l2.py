"""A V4L2 camera, by a stand-in of its driver under FFmpeg itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.v4l2_camera import needs_video4linux, v4l2_camera

pytest.importorskip("av", reason="needs vtx-edge[video]")
pytestmark = needs_video4linux
FRAMES, SIDE, LATER = 30, 60, 40
WATCH = """
import json, sys, time
from vtx.tools.watch.config import SourceConfig, StandingQuestion
from vtx.tools.watch.sources import FrameSource, Newest

class Sizes(Newest):
    def put(self, read):
        self.told = [*getattr(self, "told", []), read().size]

newest, states = Sizes(None, lambda: None, time.monotonic), []
config = SourceConfig("s", (StandingQuestion("a", "?"),), camera=sys.argv[1])
source = FrameSource(config, newest, lambda state, more: states.append((state, more)), pause=lambda *_: len(states) > 3)
source.start()
source.thread.join()
print(json.dumps([states, newest.told, source.corrupt]))
"""


@pytest.mark.slow
def test_a_camera_that_changes_its_size_while_it_streams_is_opened_again_and_no_frame_is_read_wrongly(
    tmp_path: Path,
) -> None:
    frame = np.random.default_rng(0).integers(0, 256, 2 * SIDE * SIDE, np.uint8).tobytes()
    device, variables = v4l2_camera(tmp_path, "YUYV", frame, SIDE, 2 * SIDE, frames=FRAMES, later_side=LATER)
    command = [sys.executable, "-c", WATCH, device]
    run = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, check=True)
    states, shown, corrupt = json.loads(run.stdout)
    changed = "the camera changed its format from 60x60 YUYV of 120 bytes a row to 40x40 YUYV of 80 bytes a row"
    assert states[:3] == [["open", {}], ["lost", {"error": changed, "retry_s": 1.0}], ["open", {}]]
    assert states[3] == ["lost", {"error": "No such device", "retry_s": 1.0}], "it is gone at the end"
    assert corrupt == 2, "of the first two one is damaged and one cut short"
    assert shown[: FRAMES - 2] == [[SIDE, SIDE]] * (FRAMES - 2)
    assert {*map(tuple, shown[FRAMES - 2 :])} == {(LATER, LATER)}
