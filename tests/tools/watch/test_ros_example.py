"""The example package for ROS 2: its messages and nodes, against a stand-in of rclpy and of the message types."""

from __future__ import annotations

import array
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.clock import Clock

from vtx.runtime.vision.image import load_image
from vtx.tools.watch.config import read_config

PACKAGE = Path(__file__).resolve().parents[3] / "examples" / "ros2"
PICTURE = np.arange(5 * 3 * 3, dtype=np.uint8).reshape(3, 5, 3) * 5


class Ros:
    """Stand-ins of ROS: a node with parameters, whose subscription gets `messages`, and whose publisher keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **parameters: Any) -> None:
        self.parameters, self.messages, self.published = parameters, list[Any](), list[Any]()
        self.kind, self.topic, self.ended, self.warnings = "", "", 0, list[str]()
        self.received: Callable[[Any], None] = lambda _: None
        names: dict[str, dict[str, Any]] = {
            "rclpy": {"init": lambda: None, "spin": self.spin, "try_shutdown": self.shutdown},
            "rclpy.node": {"Node": lambda _: self},
            "rclpy.qos": {"QoSProfile": SimpleNamespace, "ReliabilityPolicy": SimpleNamespace(BEST_EFFORT="newest")},
            "sensor_msgs": {}, "sensor_msgs.msg": {"Image": "Image", "CompressedImage": "CompressedImage"},
            "std_msgs": {}, "std_msgs.msg": {"String": SimpleNamespace},
        }  # fmt: skip
        for name, values in names.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)

    def declare_parameter(self, name: str, default: Any) -> Any:
        return SimpleNamespace(value=self.parameters.get(name, default))

    def create_subscription(self, kind: Any, topic: str, received: Callable[[Any], None], profile: Any) -> None:
        assert (profile.depth, profile.reliability) == (1, "newest")
        self.kind, self.topic, self.received = kind, topic, received

    def create_publisher(self, _: Any, topic: str, __: int) -> Any:
        self.topic = topic
        return SimpleNamespace(publish=lambda message: self.published.append(message.data))

    def get_logger(self) -> Any:
        return SimpleNamespace(warning=lambda text, throttle_duration_sec: self.warnings.append(text))

    def spin(self, _: Any) -> None:
        for message in self.messages:
            self.received(message)
        raise KeyboardInterrupt

    def destroy_node(self) -> None:
        self.ended += 1

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vtx_watch_ros"]:
        monkeypatch.delitem(sys.modules, name)


def message(encoding: str, pixels: np.ndarray, pad: int = 0) -> Any:
    """A sensor_msgs/Image as rclpy gives it: data in an array of bytes, lines with padding."""
    height, width = pixels.shape[:2]
    lines = pixels.reshape(height, -1)
    padded = np.pad(lines, ((0, 0), (0, pad)), constant_values=255)
    return SimpleNamespace(
        encoding=encoding, width=width, height=height, step=padded.shape[1], data=array.array("B", padded.tobytes())
    )


@pytest.mark.parametrize("pad", [0, 7])
@pytest.mark.parametrize(
    ("encoding", "pixels"),
    [
        ("rgb8", PICTURE), ("bgr8", PICTURE[..., ::-1]), ("8UC3", PICTURE[..., ::-1]),
        ("rgba8", np.dstack([PICTURE, np.full((3, 5), 255, np.uint8)])),
        ("bgra8", np.dstack([PICTURE[..., ::-1], np.full((3, 5), 255, np.uint8)])),
    ],
)  # fmt: skip
def test_each_encoding_of_an_image_gives_its_picture(encoding: str, pixels: np.ndarray, pad: int) -> None:
    from vtx_watch_ros.frames import picture_file

    np.testing.assert_array_equal(np.asarray(load_image(picture_file(message(encoding, pixels, pad)))), PICTURE)


def test_grey_pictures_and_compressed_ones_are_read_and_a_last_line_need_not_be_padded() -> None:
    from vtx_watch_ros.frames import picture_file

    grey = message("mono8", PICTURE[..., 0], 3)
    grey.data = grey.data[:-3]
    shown = np.asarray(load_image(picture_file(grey)))
    np.testing.assert_array_equal(shown, np.repeat(PICTURE[..., :1], 3, 2))
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "png")
    compressed = SimpleNamespace(format="png", data=array.array("B", file.getvalue()))
    np.testing.assert_array_equal(np.asarray(load_image(picture_file(compressed))), PICTURE)


def test_what_is_no_picture_is_refused_with_its_numbers() -> None:
    from vtx_watch_ros.frames import picture_file

    with pytest.raises(ValueError, match=r"coded as '16UC1'; it must be rgb8, "):
        picture_file(message("16UC1", PICTURE))
    cut = message("rgb8", PICTURE)
    cut.data = cut.data[:-1]
    with pytest.raises(ValueError, match="a picture of 5x3 pixels has 44 bytes in lines of 15"):
        picture_file(cut)
    narrow = message("rgb8", PICTURE)
    narrow.step = 5
    with pytest.raises(ValueError, match="in lines of 5"):
        picture_file(narrow)


def test_the_folder_holds_the_newest_frame_at_the_rate(tmp_path: Path) -> None:
    from vtx_watch_ros.frames import FrameFolder

    clock = Clock()
    folder = FrameFolder(tmp_path / "new" / "camera", 2.0, clock)
    shown = list[int]()
    for seconds, level in ((0.0, 10), (0.4, 20), (0.2, 30), (0.5, 40)):
        clock.now += seconds
        folder.show(message("mono8", np.full((2, 2), level, np.uint8)))
        shown.append(load_image(tmp_path / "new" / "camera" / "frame").getpixel((0, 0))[0])  # type: ignore[index]
    assert shown == [10, 10, 30, 40]
    assert [path.name for path in (tmp_path / "new" / "camera").iterdir()] == ["frame"]


@pytest.mark.parametrize(("topic", "kind"), [("/camera/image_raw", "Image"), ("/camera/compressed", "CompressedImage")])
def test_the_node_writes_frames_and_warns_of_others(
    topic: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtx_watch_ros import frames

    ros = Ros(monkeypatch, topic=topic, folder=str(tmp_path), rate=1e6)
    ros.messages = [message("16UC1", PICTURE), message("rgb8", PICTURE)]
    frames.main()
    assert (ros.kind, ros.topic, ros.ended) == (kind, topic, 2)
    assert len(ros.warnings) == 1
    np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "frame")), PICTURE)


def test_events_are_published_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtx_watch_ros import answers

    ros = Ros(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"event": "answer"}\n{"event": "status"}\n'))
    answers.main()
    assert ros.published == ['{"event": "answer"}', '{"event": "status"}']
    assert (ros.topic, ros.ended) == ("/vtx/events", 2)


def test_its_configuration_is_one_of_vtx_watch() -> None:
    (source,) = read_config(PACKAGE / "watch.toml").source
    assert source.folder == "/dev/shm/vtx/camera"
