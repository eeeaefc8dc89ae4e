"""A camera of Video4Linux that is a file, for processes into which the stand-in of its driver is preloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "standin/v4l2.c"
LENGTH = 16384  # bytes of a buffer
needs_video4linux = pytest.mark.skipif(
    not Path("/usr/include/linux/videodev2.h").exists() or shutil.which("cc") is None,
    reason="there are no headers of Video4Linux, or no C compiler",
)


def v4l2_camera(
    folder: Path, fourcc: str, frame: bytes, side: int, stride: int, *, frames: int = 3, later_side: int | None = None
) -> tuple[Path, dict[str, str]]:
    """The device and the environment of the process that reads it; `standin/v4l2.c` says which frames come."""
    shim, device = folder / "v4l2.so", folder / "video0"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, STANDIN], check=True)
    device.write_bytes(frame.ljust(LENGTH, b"\0") + bytes(LENGTH))
    sizes = {"SIDE": side, "STRIDE": stride, "LENGTH": LENGTH, "USED": len(frame), "FRAMES": frames}
    if later_side is not None:
        sizes["LATER_SIDE"] = later_side
    said = {f"STANDIN_{name}": str(value) for name, value in sizes.items()}
    return device, {**said, "STANDIN_FOURCC": fourcc, "LD_PRELOAD": str(shim)}
