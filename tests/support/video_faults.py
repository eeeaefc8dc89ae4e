"""Decoders that go wrong, run in the confined process in place of the real one."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

from vtx.runtime.vision.video_child import Frames, frames_of

Item = tuple[dict[str, Any], list[Any]]


def crash(request: dict[str, Any]) -> Frames:
    """The process aborts after the second frame."""
    yield from _two(request)
    os.abort()


def hang(request: dict[str, Any]) -> Frames:
    yield from _two(request)
    time.sleep(600)
    return {"frames": []}


def exhaust(request: dict[str, Any]) -> Frames:
    yield from _two(request)
    return {"frames": [len(bytearray(64 << 30))]}


def _two(request: dict[str, Any]) -> Generator[Item, None, None]:
    frames = frames_of(request)
    yield next(frames)
    yield next(frames)


def lie(request: dict[str, Any]) -> Frames:
    """A frame, larger or smaller than it says."""
    yield {"number": 0, "width": 64, "height": 48, "turns": 0}, [bytes(request["sampling"]["most"])]
    return {"frames": [0]}


def miscount(request: dict[str, Any]) -> Frames:
    """Places of frames that were never given."""
    yield from _two(request)
    return {"frames": [5] * int(request["sampling"]["most"])}


def endless(request: dict[str, Any]) -> Frames:
    """One frame after the other, for ever."""
    number = 0
    while request:
        yield {"number": number, "width": 1, "height": 1, "turns": 0}, [b"rgb"]
        number += 1
    return {"frames": []}
