"""From an untrusted video to some of its frames: which ones, and their RGB pixels.

A file's container is named to the decoder by what its first bytes say, so no playlist is followed; nothing else is
opened on its behalf, and only common codecs are decoded. Bytes, duration, frames and pixels are bounded before frames
are decoded, decoding by a deadline. Frames are decoded one after the other, and only wanted ones are kept.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.checks import check_whole
from vtx.runtime.errors import DeviceError, ImageError, RequestError
from vtx.runtime.vision.files.source import open_file, read_data_url
from vtx.runtime.vision.limits import (
    MAX_FRAME_PIXELS,
    MAX_SAMPLED_FRAMES,
    MAX_VIDEO_BYTES,
    MAX_VIDEO_DECODE_SECONDS,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_SECONDS,
)

T = TypeVar("T")
HEAD_BYTES = 32
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg")
DECODERS = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}  # names of their own
PICTURES = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1")  # brands of images in MP4's container
READABLE = "MP4, MOV, MKV, WebM and AVI"
SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".3gp", ".ogv")
VideoFile: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video file by its path, its bytes or a data URL, or frames [frames, height, width, 3] RGB uint8.

    `frames` are sampled evenly from the first to the last; None: as many as the bundle says.
    """

    source: VideoFile | NDArray[np.uint8]
    frames: int | None = None

    def __post_init__(self) -> None:
        if self.frames is not None:
            check_whole("frames", self.frames, 1)
            if self.frames > MAX_SAMPLED_FRAMES:
                raise RequestError(f"frames is {self.frames}, the limit is {MAX_SAMPLED_FRAMES} of a video; take fewer")


def video(source: VideoFile | NDArray[np.uint8], *, frames: int | None = None) -> Video:
    """Say of a path, bytes or an array that it is a video: `model.open(vtx.video("clip.mp4", frames=16))`."""
    return Video(source, frames)


def as_video(source: object) -> Video | None:
    """A source as a video: what `video` gave, an array of frames, or a file that begins or is named as videos do.

    None: it is something else.
    """
    if isinstance(source, Video):
        return source
    if isinstance(source, np.ndarray):
        return Video(source) if source.ndim == 4 else None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Video(source) if container(bytes(source[:HEAD_BYTES])) else None
    if not isinstance(source, (str, os.PathLike)):
        return None
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):
            return None
        with open(source, "rb") as file:
            named = os.path.splitext(os.fspath(source))[1].lower() in SUFFIXES
            return Video(source) if container(file.read(HEAD_BYTES)) or named else None
    except (OSError, ValueError):
        return None  # whoever reads it as an image says what is wrong


def container(head: bytes) -> str | None:
    """The decoder's name of the container that a file with these first bytes has; None: it is no video's."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return None if head[8:12] in PICTURES else "mov"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    return "avi" if head[:4] == b"RIFF" and head[8:11] == b"AVI" else None


def sampled(count: int, wanted: int) -> list[int]:
    """Which of `count` frames are taken: evenly from the first to the last, rounded down; of few frames some twice."""
    return [int(place) for place in np.linspace(0, count - 1, wanted)]


def load_frames(given: Video, wanted: int, prepare: Callable[[Image.Image], T]) -> list[T]:
    """What `prepare` makes of each of the `wanted` sampled frames.

    Raises:
        ImageError: not a video, damaged, or beyond a limit (`limits.py`).
        DeviceError: PyAV is missing, which reads files.

    """
    if isinstance(given.source, np.ndarray):
        frames = given.source
        if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not frames.size:
            raise ImageError(
                f"an array of shape {list(frames.shape)} and type {frames.dtype} is not a video; give uint8 "
                "[frames, height, width, 3] RGB"
            )
        _check_pixels("the given video", frames.shape[2], frames.shape[1])
        chosen = {at: prepare(Image.fromarray(frames[at])) for at in {*sampled(len(frames), wanted)}}
        return [chosen[at] for at in sampled(len(frames), wanted)]
    with _opened(given.source) as (name, file):
        return _File(name, file).load(wanted, prepare)


@contextmanager
def _opened(source: VideoFile) -> Iterator[tuple[str, BinaryIO]]:
    """A name for messages, and the file."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        yield "the video in the data URL", BytesIO(read_data_url(source, "video", MAX_VIDEO_BYTES))
        return
    if isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) > MAX_VIDEO_BYTES:
            raise _too_large("the given video")
        yield "the given video", BytesIO(source)
        return
    if not isinstance(source, (str, os.PathLike)):
        raise ImageError(
            f"the video is of type {type(source).__name__}; give a path, a data URL, bytes, or an array of uint8 "
            "[frames, height, width, 3]"
        )
    name = f"video {str(os.fspath(source))[:200]!r}"
    with open_file(name, source) as file:
        if os.fstat(file.fileno()).st_size > MAX_VIDEO_BYTES:
            raise _too_large(name)
        yield name, file


def _too_large(name: str) -> ImageError:
    return ImageError(f"{name} is over {MAX_VIDEO_BYTES >> 20} MiB, the limit for a video; cut it, or save it smaller")


def _check_pixels(name: str, width: int, height: int) -> None:
    if not 1 <= width * height <= MAX_FRAME_PIXELS:
        raise ImageError(
            f"{name} has frames of {width}x{height} pixels; they may have 1 to {MAX_FRAME_PIXELS:,}; save it smaller"
        )


class _File:
    """One video file, read with PyAV."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._name, self._file = name, file
        self._kind = container(file.read(HEAD_BYTES))
        if self._kind is None:
            raise ImageError(f"{name} is not a video of a known format; vtx reads {READABLE}, whatever the name says")
        try:
            import av
        except ImportError as e:
            raise DeviceError('reading video files needs PyAV; pip install "vtx-edge[video]"') from e
        self._av: Any = av

    def load(self, wanted: int, prepare: Callable[[Image.Image], T]) -> list[T]:
        """What `prepare` makes of each sampled frame."""
        count = self._count()
        places = sampled(count, wanted)
        found, decoded = self._decode(places, prepare)
        if decoded < count and places[-1] >= decoded:  # more packets than pictures, as some codecs have
            places = sampled(decoded, wanted)
            found, _ = self._decode(places, prepare)
        return [found[at] for at in places]

    def _count(self) -> int:
        """Frames, as packets count them, with everything checked that is known before decoding."""
        with self._container() as (container, stream):
            seconds = stream.duration * stream.time_base if stream.duration else (container.duration or 0) / 1_000_000
            if seconds > MAX_VIDEO_SECONDS:
                raise ImageError(
                    f"{self._name} takes {float(seconds):,.0f} seconds, the limit is {MAX_VIDEO_SECONDS:,}; cut it"
                )
            context = stream.codec_context
            if context is None:  # the file ends before it says how frames are coded
                self._damaged(0)
            codec = DECODERS.get(context.name, context.name)
            if codec not in CODECS:
                raise ImageError(f"{self._name} is coded as {codec!r:.40}; vtx decodes {', '.join(CODECS)}; convert it")
            _check_pixels(self._name, context.width, context.height)
            count = 0
            for packet in container.demux(stream):
                count += bool(packet.size)
                if packet.is_corrupt:
                    self._damaged(count)
                if count > MAX_VIDEO_FRAMES:
                    raise ImageError(f"{self._name} has over {MAX_VIDEO_FRAMES:,} frames, the limit; cut it")
            if count < stream.frames:
                self._damaged(count)
        if not count:
            raise ImageError(f"{self._name} has no frames; save it again")
        return count

    def _decode(self, places: list[int], prepare: Callable[[Image.Image], T]) -> tuple[dict[int, T], int]:
        """What `prepare` makes of the frames at `places`, and how many were decoded up to the last of them."""
        found, number, deadline = dict[int, T](), 0, time.monotonic() + MAX_VIDEO_DECODE_SECONDS
        with self._container() as (container, stream):
            stream.thread_type = "AUTO"
            stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}  # frames may differ from the header
            size = None
            for frame in container.decode(stream):
                size = size or (frame.width, frame.height)
                if (frame.width, frame.height) != size:
                    raise ImageError(
                        f"{self._name} changes its size from {size[0]}x{size[1]} to {frame.width}x{frame.height} at "
                        f"frame {number}; save it in one size"
                    )
                _check_pixels(self._name, *size)
                if time.monotonic() > deadline:
                    raise ImageError(
                        f"{self._name} takes over {MAX_VIDEO_DECODE_SECONDS:g} seconds to decode; cut it, or save it "
                        "smaller"
                    )
                if number in places:
                    found[number] = prepare(_upright(frame))
                number += 1
                if number > places[-1]:
                    break
        if not number:
            raise ImageError(f"{self._name} has no frame that can be decoded; save it again")
        return found, number

    @contextmanager
    def _container(self) -> Iterator[tuple[Any, Any]]:
        """The file opened as what it is, and its video stream; every error of the decoder is an ImageError."""
        self._file.seek(0)
        try:
            with self._av.open(self._file, format=self._kind, io_open=_refuse) as container:
                streams = [s for s in container.streams.video if not s.disposition & self._pictures]
                if not streams:
                    raise ImageError(f"{self._name} has no video stream, only sound or data; give another file")
                yield container, streams[0]
        except (self._av.FFmpegError, EOFError, OSError) as e:
            reason = getattr(e, "strerror", None) or str(e)
            raise ImageError(f"{self._name} is damaged or cut off ({reason}); copy or save it again") from e
        except MemoryError as e:
            raise ImageError(f"no memory left to decode {self._name}; save it smaller, or free memory") from e

    @property
    def _pictures(self) -> Any:
        """The mark of a stream that is a cover, not a video."""
        return self._av.stream.Disposition.attached_pic

    def _damaged(self, frames: int) -> NoReturn:
        raise ImageError(f"{self._name} is cut off or damaged after {frames} frames; copy or save it again")


def _upright(frame: Any) -> Image.Image:
    """A frame as RGB, turned as its file says."""
    pixels = cast("NDArray[np.uint8]", frame.to_ndarray(format="rgb24"))
    return Image.fromarray(np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90))))


def _refuse(url: str, *_: Any) -> NoReturn:
    raise OSError(f"the video names another file, {url!r:.80}")
