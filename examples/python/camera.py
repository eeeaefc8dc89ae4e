"""A camera that asks about its newest frame; frames that arrive meanwhile are skipped.

Usage:

    python examples/python/camera.py BUNDLE FOLDER "Is the path free?"

A folder stands in for the camera: the image that was last written is the newest frame.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path

import vtx


class Newest:
    """Holds one frame; a newer one replaces it. `next` waits for one that has not been taken yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frame: Path | None = None
        self._ended = False

    def put(self, frame: Path) -> None:
        with self._changed:
            self._frame = frame
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def next(self) -> Path | None:
        """The newest frame, or None once the camera has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._ended)
            frame, self._frame = self._frame, None
            return frame


def watch(folder: Path, newest: Newest, frames: int) -> None:
    """Put frames as they are written, and end after `count` of them."""
    seen: set[Path] = set()
    while len(seen) < frames:
        fresh = sorted(set(folder.glob("*.jpg")) - seen)
        for frame in fresh:
            newest.put(frame)
        seen |= set(fresh)
        time.sleep(0.01)
    newest.end()


def answer_newest(
    model: vtx.Model, newest: Newest, question: str, show: Callable[[Path, vtx.Answer], None], timeout: float
) -> None:
    """Ask about the newest frame again and again; an answer that takes too long is cut off."""
    while (frame := newest.next()) is not None:
        with model.open(frame) as image:
            show(frame, image.ask(question, max_new_tokens=16, timeout=timeout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--frames", type=int, default=100, help="number of frames")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds for one answer")
    options = parser.parse_args()
    newest = Newest()
    with vtx.load(options.bundle) as model:
        camera = threading.Thread(target=watch, args=(options.folder, newest, options.frames), daemon=True)
        camera.start()
        answer_newest(
            model, newest, options.question, lambda frame, answer: print(f"{frame.name}: {answer}"), options.timeout
        )
        camera.join()


if __name__ == "__main__":
    main()
