"""Frames of a GStreamer pipeline, by GStreamer's own Python binding."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image

from vtx.runtime.errors import DeviceError, ImageError
from vtx.runtime.vision.image import ImageSource
from vtx.runtime.vision.limits import MAX_FRAME_PIXELS
from vtx.runtime.vision.video_child import pixels_refused

# One frame waits at most: a newer one takes its place.
SINK = "videoconvert ! video/x-raw,format=RGB ! appsink name=vtx max-buffers=1 drop=true"
PULL_SECONDS = 0.1
BUS_SECONDS = 0.01
SECOND = 1_000_000_000  # nanoseconds
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


def read_pipeline(
    description: str, put: Callable[[Callable[[], ImageSource]], None], stopped: Callable[[], bool]
) -> None:
    """`put` the newest frame of a pipeline again and again, until `stopped` returns True.

    Raises DeviceError without GStreamer's binding; ImageError for a pipeline that cannot be read, fails or ends.
    """
    try:
        import gi

        gi.require_version("Gst", "1.0")
        from gi.repository import Gst
    except (ImportError, ValueError) as e:  # the second: the binding without GStreamer's own part
        raise DeviceError(
            "reading GStreamer pipelines needs its Python binding; install PyGObject, on Debian python3-gi and "
            "gir1.2-gstreamer-1.0, for the Python that runs vtx"
        ) from e
    Gst.init(None)
    try:
        pipeline = Gst.parse_launch(f"{description} ! {SINK}")
    except Exception as e:  # GLib.Error
        raise ImageError(f"GStreamer cannot make the pipeline ({_reason(e)}); try it with gst-launch-1.0") from e
    sink = pipeline.get_by_name("vtx")
    bus = pipeline.get_bus()
    try:
        pipeline.set_state(Gst.State.PLAYING)
        while not stopped():
            sample = sink.emit("try-pull-sample", int(PULL_SECONDS * SECOND))
            if sample is not None:
                put(_frame(sample, Gst))
                continue
            ends = Gst.MessageType.ERROR | Gst.MessageType.EOS
            message = bus.timed_pop_filtered(int(BUS_SECONDS * SECOND), ends)
            if message is not None and message.type == Gst.MessageType.ERROR:
                raise ImageError(f"the pipeline failed ({_reason(message.parse_error()[0])})")
            if message is not None:
                raise ImageError("the pipeline ended")
    finally:
        pipeline.set_state(Gst.State.NULL)


def _reason(error: Any) -> str:
    """GStreamer's own words, without a user and a password of an address."""
    return _CREDENTIALS.sub("//", str(getattr(error, "message", None) or error))


def _frame(sample: Any, gst: Any) -> Callable[[], ImageSource]:
    """A function that gives the picture of a sample. Its bytes are copied now, so that no buffer is kept."""
    caps = sample.get_caps().get_structure(0)
    width = int(caps.get_value("width"))
    height = int(caps.get_value("height"))
    buffer = sample.get_buffer()
    readable, mapped = buffer.map(gst.MapFlags.READ)
    if not readable:
        return partial(_picture, b"", width, height)
    try:
        return partial(_picture, bytes(mapped.data), width, height)
    finally:
        buffer.unmap(mapped)


def _picture(content: bytes, width: int, height: int) -> ImageSource:
    """The picture in a buffer of RGB, whose lines may be padded. Raises ImageError."""
    if not 0 < width * height <= MAX_FRAME_PIXELS:
        raise ImageError(pixels_refused("the pipeline", width, height, MAX_FRAME_PIXELS))
    line = len(content) // height
    if line < 3 * width:
        raise ImageError(
            f"a frame of {width}x{height} pixels has {len(content):,} bytes, not {3 * width * height:,} of RGB"
        )
    return Image.frombuffer("RGB", (width, height), content, "raw", "RGB", line, 1)
