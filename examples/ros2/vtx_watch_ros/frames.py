"""A node that keeps the newest picture of a topic in a folder, where vtx-watch finds it.

    ros2 run vtx_watch_ros frames --ros-args -p topic:=/camera/image_raw -p folder:=/dev/shm/vtx/camera -p rate:=10.0

A topic whose name ends with /compressed is of the type sensor_msgs/CompressedImage, another of sensor_msgs/Image.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from vtx_watch_ros import running_node

# Encodings of sensor_msgs/Image: the mode of the picture, that of the bytes, and the bytes of a pixel.
MODES = {
    "rgb8": ("RGB", "RGB", 3), "8UC3": ("RGB", "BGR", 3), "bgr8": ("RGB", "BGR", 3), "rgba8": ("RGBA", "RGBA", 4),
    "bgra8": ("RGBA", "BGRA", 4), "mono8": ("L", "L", 1), "8UC1": ("L", "L", 1),
}  # fmt: skip


def picture_file(message: Any) -> bytes:
    """The picture of a sensor_msgs/Image or CompressedImage as a file: BMP, or what the camera compressed.

    Raises ValueError for another encoding, or data that are no picture of the stated size.
    """
    if not hasattr(message, "encoding"):
        return bytes(message.data)
    if message.encoding not in MODES:
        raise ValueError(f"a picture is coded as {message.encoding!r:.40}; it must be {', '.join(MODES)}")
    mode, order, each = MODES[message.encoding]
    width, height, line, content = message.width, message.height, message.step, bytes(message.data)
    if width < 1 or height < 1 or line < each * width or len(content) < line * (height - 1) + each * width:
        raise ValueError(f"a picture of {width}x{height} pixels has {len(content):,} bytes in lines of {line:,}")
    content = content.ljust(line * height, b"\0")  # the last line need not be padded
    file = io.BytesIO()
    picture = Image.frombuffer(mode, (width, height), content, "raw", order, line, 1)
    picture.convert("RGB").save(file, "bmp")
    return file.getvalue()


class FrameFolder:
    """Writes each message as the file `frame` of a folder, at most `rate` times a second."""

    def __init__(self, folder: Path, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._hidden = folder / "frame", folder / ".frame"
        self._pause, self._clock, self._due = 1 / rate, clock, -math.inf

    def show(self, message: Any) -> None:
        """Replace the file in one step, so that no one reads half a picture. Raises ValueError."""
        now = self._clock()
        if now < self._due:
            return
        self._hidden.write_bytes(picture_file(message))
        os.replace(self._hidden, self._path)
        self._due = now + self._pause


def main() -> None:
    """Run the node until it is interrupted."""
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import CompressedImage
    from sensor_msgs.msg import Image as ImageMessage

    with running_node("vtx_frames") as node:
        topic = str(node.declare_parameter("topic", "/camera/image_raw").value)
        folder = Path(str(node.declare_parameter("folder", "/dev/shm/vtx/camera").value))
        frames = FrameFolder(folder, float(node.declare_parameter("rate", 10.0).value))

        def received(message: Any) -> None:
            try:
                frames.show(message)
            except ValueError as e:
                node.get_logger().warning(str(e), throttle_duration_sec=60.0)

        kind = CompressedImage if topic.endswith("/compressed") else ImageMessage
        newest = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        node.create_subscription(kind, topic, received, newest)
        rclpy.spin(node)


if __name__ == "__main__":
    main()
