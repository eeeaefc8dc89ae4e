"""Acts at a fixed rate on the newest frames of a robot's cameras; an action that is late is dropped and counted.

Usage:

    python examples/python/control_loop.py BUNDLE STATE.json "pick up the cup" base=FOLDER wrist=FOLDER --hz 5

Folders stand in for the cameras: the picture whose name sorts last is the newest frame. STATE.json stands in for the
robot's sensors and is read at each step. Replace both, and `print`, by your robot.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import vtx


class Newest:
    """Holds one frame of each camera; a newer one replaces it."""

    def __init__(self, cameras: Sequence[str]) -> None:
        self._changed, self._frames, self._count = threading.Condition(), dict[str, Any](), len(cameras)

    def put(self, camera: str, frame: Any) -> None:
        with self._changed:
            self._frames[camera] = frame
            self._changed.notify_all()

    def frames(self) -> Mapping[str, Any]:
        """The newest frame of each camera, once every camera has given one."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) == self._count)
            return dict(self._frames)


def watch(camera: str, folder: Path, newest: Newest, ended: threading.Event) -> None:
    """Put a camera's frames as they are written."""
    last: Path | None = None
    while not ended.wait(0.005):
        found = max(folder.glob("*.jpg"), default=None)
        if found is not None and found != last:
            newest.put(camera, found)
            last = found


def control(
    model: vtx.Model, newest: Newest, instruction: str, state: Callable[[], Any], send: Callable[[int, Any], None], *,
    hz: float, steps: int, now: Callable[[], float] = time.monotonic, wait: Callable[[float], None] = time.sleep,
    **options: Any,
) -> int:  # fmt: skip
    """Send the first action for the newest frames at each step; the number of steps that had none.

    An action must be there before its step ends. A step that passes while an earlier action is late is missed, too.
    """
    newest.frames()
    begun, period, step, sent = now(), 1 / hz, 0, 0
    while step < steps:
        left = begun + (step + 1) * period - now()
        try:
            actions = model.act(newest.frames(), instruction, state(), deadline_ms=max(1000 * left, 1e-3), **options)
        except vtx.DeadlineError:
            pass
        else:
            send(step, actions[0])
            sent += 1
        step = max(step + 1, int((now() - begun) / period))
        wait(max(0.0, begun + step * period - now()))
    return steps - sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("instruction")
    parser.add_argument("cameras", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--hz", type=float, default=5.0, help="steps a second")
    parser.add_argument("--steps", type=int, default=100, help="number of steps")
    parser.add_argument("--k", type=int, help="first layer without image tokens")
    parser.add_argument("--normalized", action="store_true", help="state and actions are normalised")
    given = parser.parse_args()
    folders = {name: Path(folder) for name, _, folder in (camera.partition("=") for camera in given.cameras)}
    newest, ended = Newest([*folders]), threading.Event()
    for name, folder in folders.items():
        threading.Thread(target=watch, args=(name, folder, newest, ended), daemon=True).start()
    with vtx.load(given.bundle) as model:
        missed = control(
            model, newest, given.instruction, lambda: json.loads(given.state.read_text()),
            lambda step, action: print(f"step {step}: {np.round(action, 3).tolist()}"), hz=given.hz, steps=given.steps,
            k=given.k, normalized=given.normalized,
        )  # fmt: skip
    ended.set()
    print(f"{missed} of {given.steps} steps missed")


if __name__ == "__main__":
    main()
