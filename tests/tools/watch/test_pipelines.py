"""GStreamer pipelines as sources: against a stand-in of the binding, and GStreamer itself where it is installed."""

from __future__ import annotations

import queue
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vtx.runtime.errors import DeviceError, ImageError, RequestError
from vtx.runtime.vision.image import load_image
from vtx.runtime.vision.limits import MAX_FRAME_PIXELS
from vtx.tools.watch.config import SourceConfig, StandingQuestion
from vtx.tools.watch.pipelines import SINK, read_pipeline
from vtx.tools.watch.sources import FrameSource, Newest

WAIT = 60.0  # seconds for what should happen at once, on a busy machine
ERROR, EOS = 2, 1
QUESTION = (StandingQuestion("q", "What?"),)


class Sample:
    """A frame as GStreamer hands it on: lines of RGB padded to 4 bytes, and a buffer that must be given back."""

    def __init__(
        self, level: int, size: tuple[int, int], content: bytes | None = None, *, readable: bool = True
    ) -> None:
        self.width, self.height = size
        line = bytes([level]) * (3 * self.width) + b"\xaa" * (-3 * self.width % 4)
        self.content, self.readable = line * self.height if content is None else content, readable
        self.mapped = 0

    def get_caps(self) -> Any:
        return SimpleNamespace(get_structure=lambda _: SimpleNamespace(get_value=lambda name: getattr(self, name)))

    def get_buffer(self) -> Any:
        return self

    def map(self, _: Any) -> tuple[bool, Any]:
        self.mapped += self.readable
        return self.readable, SimpleNamespace(data=memoryview(self.content))

    def unmap(self, _: Any) -> None:
        self.mapped -= 1


class Gst(ModuleType):
    """As much of the binding as is used: what is in `given` comes out of the sink, a message goes to the bus."""

    State = SimpleNamespace(PLAYING="playing", NULL="null")
    MessageType = SimpleNamespace(ERROR=ERROR, EOS=EOS)
    MapFlags = SimpleNamespace(READ=1)

    def __init__(self, *given: Any) -> None:
        super().__init__("gi.repository.Gst")
        self.given, self.launched, self.states = queue.SimpleQueue[Any](), list[str](), list[str]()
        self.message: Any = None
        for each in given:
            self.given.put(each)

    def init(self, _: None) -> None:
        pass

    def parse_launch(self, text: str) -> Any:
        if "nothing" in text:
            raise ValueError('no element "nothing" at rtsp://user:secret@camera/')
        self.launched.append(text)
        return self

    def get_by_name(self, name: str) -> Any:
        return self if name == "vtx" else None

    def get_bus(self) -> Any:
        return self

    def set_state(self, state: str) -> None:
        self.states.append(state)

    def emit(self, signal: str, nanoseconds: int) -> Any:
        assert (signal, nanoseconds) == ("try-pull-sample", 100_000_000)
        if self.message is not None:
            return None
        given = self.given.get(timeout=WAIT)
        if given is None or isinstance(given, Sample):
            return given
        self.message = given
        return None

    def timed_pop_filtered(self, _: int, kinds: int) -> Any:
        message, self.message = self.message, None
        return message if message is not None and message.type & kinds else None


def failed(text: str) -> Any:
    return SimpleNamespace(type=ERROR, parse_error=lambda: (SimpleNamespace(message=text), "where"))


ENDED = SimpleNamespace(type=EOS)


@pytest.fixture
def gst(monkeypatch: pytest.MonkeyPatch) -> Gst:
    made, gi, repository = Gst(), ModuleType("gi"), ModuleType("gi.repository")
    gi.require_version = lambda *_: None  # type: ignore[attr-defined]
    repository.Gst = made  # type: ignore[attr-defined]
    for module in (gi, repository):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def frames_of(description: str = "src") -> tuple[list[Any], str]:
    """What a pipeline gives until it is refused, and why it is."""
    got = list[Any]()
    with pytest.raises(ImageError) as refused:
        read_pipeline(description, got.append, lambda: False)
    return got, str(refused.value)


def test_frames_of_changing_size_come_with_padded_lines_and_their_buffers_go_back(gst: Gst) -> None:
    samples = [Sample(30, (4, 2)), Sample(60, (5, 3)), Sample(90, (7, 4))]
    for given in (*samples, None, ENDED):  # None: no frame for a while
        gst.given.put(given)
    got, reason = frames_of("v4l2src")
    assert reason == "the pipeline ended"
    for read, sample, level in zip(got, samples, (30, 60, 90), strict=True):
        np.testing.assert_array_equal(np.asarray(read()), np.full((sample.height, sample.width, 3), level))
        assert sample.mapped == 0
    assert gst.launched == [f"v4l2src ! {SINK}"]
    assert gst.states == ["playing", "null"]


def test_broken_frames_are_errors_of_their_own_and_the_next_comes(gst: Gst) -> None:
    wide = (1 << 15, MAX_FRAME_PIXELS >> 14)
    for given in (
        Sample(1, (4, 2), b"short"),
        Sample(1, wide, b""),
        Sample(1, (4, 2), readable=False),
        Sample(9, (4, 2)),
    ):
        gst.given.put(given)
    gst.given.put(ENDED)
    (short, large, unreadable, good), _ = frames_of()
    with pytest.raises(ImageError, match="a frame of 4x2 pixels has 5 bytes, not 24 of RGB"):
        short()
    with pytest.raises(ImageError, match="save it smaller"):
        large()
    with pytest.raises(ImageError, match="has 0 bytes"):
        unreadable()
    assert good().getpixel((0, 0)) == (9, 9, 9)


def test_what_fails_is_told_in_gstreamers_words_without_a_password(gst: Gst) -> None:
    gst.given.put(failed("cannot open rtsp://user:secret@camera/live"))
    got, reason = frames_of()
    assert (got, reason) == ([], "the pipeline failed (cannot open rtsp://camera/live)")
    assert gst.states[-1] == "null"
    assert frames_of("nothing")[1] == (
        'GStreamer cannot make the pipeline (no element "nothing" at rtsp://camera/); try it with gst-launch-1.0'
    )


def test_a_pipeline_that_ends_is_opened_again_until_it_is_closed(gst: Gst) -> None:
    said, came = queue.SimpleQueue[tuple[str, dict[str, Any]]](), threading.Event()
    newest = Newest(None, came.set, lambda: 0.0)
    config = SourceConfig("s", QUESTION, pipeline="v4l2src")
    source = FrameSource(config, newest, lambda *told: said.put(told), pause=lambda closed, _: closed.is_set())
    for given in (Sample(10, (4, 2)), ENDED, Sample(20, (4, 2))):
        gst.given.put(given)
    source.start()
    told = [said.get(timeout=WAIT) for _ in range(3)]
    assert [state for state, _ in told] == ["open", "lost", "open"]
    assert told[1][1]["error"] == "the pipeline ended"
    source.close()
    gst.given.put(None)
    source.thread.join(WAIT)
    assert not source.thread.is_alive()
    assert gst.states == ["playing", "null"] * 2


@pytest.mark.parametrize("missing", ["gi", "gi.repository", "version"])
def test_without_the_binding_it_is_refused_by_what_to_install(
    gst: Gst, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: str) -> None:
        raise ValueError("Namespace Gst not available")

    if missing == "version":
        monkeypatch.setattr(sys.modules["gi"], "require_version", absent)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DeviceError, match="install PyGObject, on Debian python3-gi and gir1"):
        read_pipeline("src", lambda _: None, lambda: True)


def test_a_source_is_a_pipeline_or_another_kind_but_not_two() -> None:
    assert SourceConfig("s", QUESTION, pipeline="v4l2src").kind == "pipeline"
    with pytest.raises(RequestError, match="has camera and pipeline; give one of camera, stream, pipeline"):
        SourceConfig("s", QUESTION, pipeline="v4l2src", camera="/dev/video0")


@pytest.mark.filterwarnings("ignore::ImportWarning")  # of PyGObject 3.42 on Python 3.11
def test_gstreamer_itself_gives_its_test_picture() -> None:
    gi = pytest.importorskip("gi", reason="needs GStreamer's Python binding")
    try:
        gi.require_version("Gst", "1.0")
    except ValueError:
        pytest.skip("needs GStreamer's Python binding")
    got = list[Any]()
    with pytest.raises(ImageError, match="the pipeline ended"):
        read_pipeline(
            "videotestsrc num-buffers=2 pattern=red ! video/x-raw,width=31,height=20", got.append, lambda: False
        )
    image = load_image(got[-1]())
    assert isinstance(image, Image.Image)
    assert image.size == (31, 20)
    assert np.asarray(image)[5, 5, 0] > 200
    for text, reason in (
        ("no-such-element", "cannot make the pipeline"),
        ("filesrc location=/none ! decodebin", "failed"),
    ):
        with pytest.raises(ImageError, match=reason):
            read_pipeline(text, got.append, lambda: False)
