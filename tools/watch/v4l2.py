"""The format of the pixels that a V4L2 camera gives, as its driver tells it while another reads the camera."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CAPTURE = 1  # V4L2_BUF_TYPE_VIDEO_CAPTURE
UNION = struct.calcsize("P")  # its place in struct v4l2_format, of 200 bytes
GET_FORMAT = 0xC0005604 | (UNION + 200) << 16  # VIDIOC_G_FMT


@contextmanager
def told_format(device: str) -> Iterator[Callable[[], str]]:
    """A function that says how a camera's frames lie in memory: "640x480 YUYV of 1280 bytes a row"; "" if unknown."""
    from fcntl import ioctl

    file = -1
    with suppress(OSError):
        file = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def tell() -> str:
        request = bytearray(struct.pack("I", CAPTURE).ljust(UNION + 200, b"\0"))
        try:
            ioctl(file, GET_FORMAT, request)
        except (OSError, ValueError):
            return ""
        width, height, code, _, row = struct.unpack_from("=II4sII", request, UNION)
        return f"{width}x{height} {code.decode('ascii', 'replace').strip()} of {row} bytes a row"

    try:
        yield tell
    finally:
        if file >= 0:
            os.close(file)
