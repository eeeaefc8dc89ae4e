"""Frames that PyAV decodes: which are damaged, and how they are turned."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from vtx.runtime.errors import ImageError

DOUBTFUL = 3  # a packet that a parser marks and two behind it: one of them lacks a part
_MATRIX = struct.Struct("=9i")  # of a track: x' = a x + c y, y' = b x + d y, in rows of three


def decoder_options(codec: str, pixels: int) -> dict[str, str]:
    """The decoder's options: frames of at most `pixels`, and of JPEGs no half ones, which it would return as whole."""
    strict = {"err_detect": "explode"} if codec == "mjpeg" else {}
    return {"max_pixels": str(pixels), **strict}


def conversion() -> dict[str, int]:
    """Arguments for PyAV to convert frames in the calling thread.

    From its release 17 on it would start a thread a core for each frame, and keep them until the frame is collected.
    """
    from av import __version__

    return {"threads": 1} if int(__version__.partition(".")[0]) >= 17 else {}


def decoded(packets: Iterable[Any], *, exact: bool = False) -> Iterator[tuple[Any, Exception | None]]:
    """Each frame of the packets, and the error if it is damaged; no frame for a packet that cannot be decoded.

    Frames are predicted from earlier ones, so that all up to the next key frame are damaged with the first one.
    `exact`: the packets that are marked as corrupt are those that lack a part, as those of a camera's driver are.
    """
    from av import FFmpegError

    damage: Exception | None = None
    since: int | None = None  # in the stream's time
    marked = 1 if exact else DOUBTFUL
    doubtful = 0  # packets that may lack a part
    for packet in packets:
        try:
            frames = packet.decode()
        except FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
            damage = error
            since = packet.pts
            yield None, error
            continue
        doubtful = marked if packet.is_corrupt else max(0, doubtful - 1)
        if doubtful:  # their frames may come after later packets
            damage = ImageError("a frame is damaged")
            since = packet.pts
        for frame in frames:
            if frame.is_corrupt:
                damage = ImageError("a frame is damaged")
                since = frame.pts
            elif frame.key_frame and not doubtful and _is_behind(frame, since, exact=exact):
                damage = None
            yield frame, damage


def _is_behind(frame: Any, time: int | None, *, exact: bool) -> bool:
    """True unless a frame is known to be that of a time in the stream, or an earlier one.

    `exact`: frames come with their packets, and drivers without a clock give all of them one time.
    """
    return time is None or frame.pts is None or frame.pts > time or (exact and frame.pts == time)


def orientation(frame: Any) -> tuple[bool, int]:
    """True if a frame is to be mirrored, left to right; and then its quarter turns to the left, 0 to 3."""
    data = next((bytes(data) for data in frame.side_data if data.type.name == "DISPLAYMATRIX"), b"")
    if len(data) != _MATRIX.size:
        return False, 0
    a, b, _, c, d, *_ = _MATRIX.unpack(data)
    mirrored = a * d - b * c < 0
    right = math.atan2(-b, -a) if mirrored else math.atan2(b, a)  # the angle of a row, turned with the clock
    return mirrored, round(-right / (math.pi / 2)) % 4


def fault(error: Exception) -> str:
    """The reason why a frame is damaged, in the decoder's words."""
    return str(getattr(error, "strerror", None) or error)
