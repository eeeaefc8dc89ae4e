"""Frames of cameras, streams, videos and folders: each source has a thread, and of its frames the newest is kept."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image

from vtx.runtime.errors import DeviceError, ImageError, VtxError
from vtx.runtime.installing import install
from vtx.runtime.vision.decoding import conversion, decoded, decoder_options, fault, orientation
from vtx.runtime.vision.image import ImageSource, load_image
from vtx.runtime.vision.limits import MAX_FILE_BYTES, MAX_FRAME_PIXELS
from vtx.runtime.vision.video import play
from vtx.tools.watch.config import SourceConfig, WatchConfig
from vtx.tools.watch.v4l2 import told_format

POLL_SECONDS = 0.1  # between two looks into a folder
FIRST_PAUSE = 1.0  # seconds before a lost source is opened again; doubled each time
MOST_PAUSE = 60.0
OPEN_SECONDS = 10.0  # that opening a stream, and waiting for its next packet, may take
READ_SECONDS = 10.0
SNAPSHOTS = ("jpeg_pipe", "png_pipe", "webp_pipe")  # FFmpeg's names of one picture
SNAPSHOT_SECONDS = 1.0  # from one request to the next, if a source has no rate
JUMP_SECONDS = 60.0  # between two frames of a video; a longer step, or one back, is not waited for
BAD_FRAMES = 100  # in a row, after which a stream is opened again
STREAM = {
    "rtsp_transport": "tcp",
    "fflags": "nobuffer",
    "protocol_whitelist": "rtsp,rtsps,rtp,srtp,rtmp,http,https,tcp,udp,srt,tls,crypto,httpproxy",
}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame; `number` counts those of its source, `at` is the monotonic clock's and `time` the wall clock's.

    `read` gives its pixels, and may raise.
    """

    number: int
    at: float
    time: float
    read: Callable[[], ImageSource]


class Newest:
    """Holds the newest frame of a source, which is taken `rate` times a second at most.

    `changed` is called after each `put`, which never waits. `frames` came, and `dropped` of them were replaced by a
    newer one before they were taken. `last` is the newest one, taken or not.
    """

    def __init__(self, rate: float | None, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self._pause = 0.0 if rate is None else 1 / rate
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._frame: Frame | None = None
        self.last: Frame | None = None
        self.frames = self.dropped = 0
        self.last_at = clock()
        self.due_from = -math.inf  # of the monotonic clock: the next frame may be taken

    def put(self, read: Callable[[], ImageSource]) -> None:
        with self._lock:
            self.frames += 1
            self.dropped += self._frame is not None
            self.last_at = self._clock()
            self._frame = self.last = Frame(self.frames, self.last_at, time.time(), read)
        self._changed()

    def missed(self, count: int) -> None:
        """Count frames that came and were replaced before they could be put."""
        with self._lock:
            self.frames += count
            self.dropped += count

    def take(self) -> Frame | None:
        """The newest frame, once."""
        with self._lock:
            frame = self._frame
            self._frame = None
        if frame is not None:
            self.due_from = self._clock() + self._pause
        return frame

    @property
    def waiting(self) -> bool:
        """True if there is a frame that was not taken."""
        return self._frame is not None


def _opened(av: Any, config: SourceConfig) -> Any:
    """The container of a camera or a stream."""
    if config.camera is None:
        return av.open(str(config.stream), options=STREAM, timeout=(OPEN_SECONDS, READ_SECONDS))
    size = {} if config.size is None else {"video_size": config.size}
    return av.open(config.camera, format="v4l2", options=size, timeout=(OPEN_SECONDS, READ_SECONDS))


class FrameSource:
    """A source that is read in a thread of its own until `close`, or the end of a video.

    One that is lost is opened again, after a pause that doubles. `say` gets each new state ("open", "lost" or "ended")
    with what else is known of it. `corrupt` counts frames that could not be decoded, the last because of `error`.
    """

    def __init__(
        self,
        config: SourceConfig,
        newest: Newest,
        say: Callable[[str, dict[str, Any]], None],
        *,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self.config = config
        self.newest = newest
        self.state = "opening"
        self.corrupt = 0
        self.error = ""
        self._say = say
        self._pause = pause
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"vtx-watch {config.name}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self.thread.start()

    def close(self) -> None:
        """End it soon; a driver that does not return is left behind."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _run(self) -> None:
        readers = {"folder": self._folder, "video": self._video, "pipeline": self._pipeline}
        pause = FIRST_PAUSE
        reader = readers.get(self.config.kind, self._stream)
        while not self.closed:
            try:
                reader()
                return self._now("ended")
            except Exception as e:  # decoders and drivers fail in every way
                reason = str(e) if isinstance(e, VtxError) else getattr(e, "strerror", None) or type(e).__name__
                if self.config.kind == "video":
                    return self._now("ended", error=reason)
                pause = FIRST_PAUSE if self.state == "open" else pause
                self._now("lost", error=reason, retry_s=pause)
            if self._pause(self._closed, pause):
                return None
            pause = min(2 * pause, MOST_PAUSE)
        return None

    def _now(self, state: str, **more: Any) -> None:
        self.state = state
        if not self.closed:
            self._say(state, more)

    def _count_corrupt(self, reason: str) -> None:
        self.corrupt += 1
        self.error = reason

    def _put(self, read: Callable[[], ImageSource]) -> None:
        if self.state != "open":
            self._now("open")
        self.newest.put(read)

    def _folder(self) -> None:
        """Pictures as they are written; one that is written on, or replaced, comes again.

        A picture is new if it was not there before, whatever its time says.
        """
        folder = str(self.config.folder)
        names = set[str]()
        scanned = -1
        latest = ""
        written = (0, 0)
        while not self.closed:
            changed = os.stat(folder).st_mtime_ns
            if changed != scanned:
                with os.scandir(folder) as entries:
                    there = {entry.name for entry in entries if not entry.name.startswith(".")}
                new = sorted((times, name) for name in there - names if (times := _written(folder, name)) is not None)
                if new:
                    if latest:
                        self.newest.missed(len(new) - 1)
                    written, latest = new[-1]
                    self._put(partial(os.path.join, folder, latest))
                # A change right after this scan may leave the folder's time as it is, so fresh ones are scanned again.
                names, scanned = there, changed if time.time_ns() - changed > 50_000_000 else -1
            now = _written(folder, latest) if latest else None
            if now is not None and now != written:
                written = now
                self._put(partial(os.path.join, folder, latest))
            self._closed.wait(POLL_SECONDS)

    def _video(self) -> None:
        """The frames of a file at their times; after a jump of these the next frame comes at once."""
        speed = self.config.speed
        begun = 0.0
        last = math.nan

        def show(image: Image.Image, seconds: float) -> None:
            nonlocal begun, last
            if not 0 <= seconds - last <= JUMP_SECONDS:  # nor is it for the first
                begun = time.monotonic() - seconds / speed
            last = seconds
            self._pause(self._closed, max(0.0, begun + seconds / speed - time.monotonic()))
            self._put(lambda: image)

        play(str(self.config.video), show, lambda: self.closed, damaged=self._count_corrupt, slowest=speed)

    def _pipeline(self) -> None:
        """The frames of a GStreamer pipeline."""
        from vtx.tools.watch.pipelines import read_pipeline

        read_pipeline(str(self.config.pipeline), self._put, lambda: self.closed)

    def _stream(self) -> None:
        """The frames of a camera or a stream, decoded in this thread as they come."""
        try:
            import av
        except ImportError as e:
            raise DeviceError(f"reading cameras and streams needs PyAV; {install('video')}") from e
        config = self.config
        bad = 0
        converting = threading.Lock()
        opened = _opened(av, config)
        if config.camera is None and opened.format.name in SNAPSHOTS:
            opened.close()
            return self._snapshots(av)
        with (
            opened as container,
            nullcontext(str) if config.camera is None else told_format(config.camera) as format_now,
        ):
            if not container.streams.video:
                raise ImageError("it has no video, only sound or data; give another address")
            start = format_now()
            stream = container.streams.video[0]
            stream.codec_context.options = decoder_options(stream.codec_context.name, MAX_FRAME_PIXELS)

            def packets() -> Iterator[Any]:
                for packet in container.demux(stream):
                    if self.closed:
                        return
                    if start and (now := format_now()) not in ("", start):  # FFmpeg reads on as if it had not
                        raise ImageError(f"the camera changed its format from {start} to {now}")
                    yield packet

            for frame, damage in decoded(packets(), exact=config.camera is not None):
                if damage is None:
                    bad = 0
                    self._put(partial(_converted, frame, converting))
                    continue
                bad += 1
                self._count_corrupt(fault(damage))
                if bad == BAD_FRAMES:
                    raise ImageError(f"{BAD_FRAMES} frames in a row cannot be decoded ({fault(damage)})") from damage
            if self.closed:
                return None
        raise ImageError("the stream ended")

    def _snapshots(self, av: Any) -> None:
        """The pictures of an address that answers each request with one, as cameras' snapshot addresses do."""
        address = str(self.config.stream)
        pause = SNAPSHOT_SECONDS if self.config.rate is None else 1 / self.config.rate
        options = {"protocol_whitelist": STREAM["protocol_whitelist"]}
        while not self.closed:
            start = time.monotonic()
            content = bytearray()
            with av.open(address, format="data", options=options, timeout=(OPEN_SECONDS, READ_SECONDS)) as container:
                for packet in container.demux():
                    content += bytes(packet)
                    if len(content) > MAX_FILE_BYTES:
                        raise ImageError(f"a picture is over {MAX_FILE_BYTES >> 20} MiB, the limit")
            self._put(partial(bytes, content))
            self._closed.wait(max(0.0, start + pause - time.monotonic()))


def _converted(frame: Any, converting: threading.Lock) -> ImageSource:
    """The picture of a decoded frame, for one thread at a time. Raises ImageError."""
    try:
        with converting:
            picture: Image.Image = frame.to_image(**conversion())
        mirrored, turns = orientation(frame)
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else picture
        return picture.rotate(90 * turns, expand=True) if turns else picture
    except Exception as e:  # of the decoder, in whatever form
        raise ImageError(f"a frame cannot be converted ({getattr(e, 'strerror', None) or type(e).__name__})") from e


def _written(folder: str, name: str) -> tuple[int, int] | None:
    """Time and size of a regular file; None if it is none."""
    try:
        status = os.stat(os.path.join(folder, name))
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


def first_frames(config: WatchConfig, formats: Sequence[str]) -> list[tuple[str, tuple[int, int] | VtxError]]:
    """The size (width, height) of each source's first frame, or why there is none. All are opened at once."""
    opened = list[tuple[FrameSource, threading.Event, list[VtxError]]]()
    for source in config.source:
        came, errors = threading.Event(), list[VtxError]()

        def say(_: str, more: dict[str, Any], came: threading.Event = came, errors: list[VtxError] = errors) -> None:
            if "error" in more:
                errors.append(ImageError(more["error"]))
                came.set()

        newest = Newest(None, came.set, time.monotonic)
        opened.append((FrameSource(source, newest, say), came, errors))
        opened[-1][0].start()
    ends = time.monotonic() + OPEN_SECONDS + READ_SECONDS
    sizes = list[tuple[str, tuple[int, int] | VtxError]]()
    for reader, came, errors in opened:
        came.wait(max(0.0, ends - time.monotonic()))
        frame = reader.newest.take()
        try:
            if frame is None:
                raise errors[0] if errors else ImageError(f"no frame came in {OPEN_SECONDS + READ_SECONDS:g} s")
            sizes.append((reader.config.name, load_image(frame.read(), formats).size))
        except VtxError as e:
            sizes.append((reader.config.name, e))
        reader.close()
    return sizes
