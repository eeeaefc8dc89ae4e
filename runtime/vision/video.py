"""From an untrusted video to the RGB pixels of its sampled frames.

Files are decoded in a confined child process (`video_child.py`), held to limits of memory and time: a crash or a hang
of the decoder is an ImageError here. Frames come through a pipe one after the other, and only what is made of them is
kept.
"""

from __future__ import annotations

import math
import numbers
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.checks import check_whole
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.vision.files.source import open_file, read_data_url
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames
from vtx.runtime.vision.limits import (
    MAX_CHOSEN_FRAMES,
    MAX_FRAME_PIXELS,
    MAX_VIDEO_BYTES,
    MAX_VIDEO_DECODE_SECONDS,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_MEMORY,
    MAX_VIDEO_SECONDS,
)

T = TypeVar("T")
HEAD_BYTES = 32
MAX_RATE = 1000  # frames a second
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg")
CHILD = "vtx.runtime.vision.video_child:frames_of"
LIBRARIES = ("av",)
EVERY = "vtx.runtime.vision.video_child:all_frames"
PICTURES = (  # brands of images in MP4's container
    b"avif",
    b"avis",
    b"heic",
    b"heim",
    b"heis",
    b"heix",
    b"hevc",
    b"hevm",
    b"hevs",
    b"hevx",
    b"mif1",
    b"msf1",
    b"crx ",
)
READABLE = "MP4, MOV, MKV, WebM and AVI"
SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".3gp", ".ogv")
VideoFile: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video file by its path, its bytes or a data URL, or frames [frames, height, width, 3] RGB uint8.

    `frames` are sampled evenly from the first to the last; None: as many as the bundle says. `fps`: frames a second of
    an array, 24 if left out; a file says its own.
    """

    source: VideoFile | NDArray[np.uint8]
    frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.fps is not None:
            if not isinstance(self.source, np.ndarray):
                raise RequestError("fps is given for a video file, which says its own; leave it out")
            if isinstance(self.fps, bool) or not isinstance(self.fps, numbers.Real) or not 0 < self.fps <= MAX_RATE:
                raise RequestError(f"fps is {self.fps!r:.40}; give a number of frames a second up to {MAX_RATE}")
        if self.frames is not None:
            check_whole("frames", self.frames, 1)
            if self.frames > MAX_CHOSEN_FRAMES:
                raise RequestError(f"frames is {self.frames}, the limit is {MAX_CHOSEN_FRAMES} of a video; use fewer")


def video(source: VideoFile | NDArray[np.uint8], *, frames: int | None = None, fps: float | None = None) -> Video:
    """Mark a path, bytes or an array as a video: `model.open(vtx.video("clip.mp4", frames=16))`.

    `fps`: frames per second of an array, for models that read timestamps; default: 24.
    """
    return Video(source, frames, fps)


def as_video(source: object) -> Video | None:
    """A source as a video: the result of `video`, an array of frames, or a file that begins or is named like a video.

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
        return None  # reading it as an image raises what is wrong


def container(head: bytes) -> str | None:
    """The decoder's name of the container that a file with these first bytes has; None: not a video's."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return None if head[8:12] in PICTURES else "mov"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    return "avi" if head[:4] == b"RIFF" and head[8:11] == b"AVI" else None


def load_frames(
    given: Video,
    sampling: FrameSampling,
    prepare: Callable[[Image.Image], T],
    stopped: Callable[[], bool] | None = None,
    *,
    begun: Callable[[SampledFrames], object] = lambda _: None,
) -> list[T]:
    """`prepare` of each of the frames that `sampling` takes, as many as the video asks for.

    Reading ends once `stopped` is true. `begun` gets what is sampled before the first frame, and again if the file
    turns out to have fewer frames than it said.

    Raises ImageError if it is not a video, damaged, or beyond a limit (`limits.py`); DeviceError if PyAV, which reads
    files, is missing; RequestError if it was stopped.
    """
    most = given.frames or sampling.most
    if isinstance(given.source, np.ndarray):
        clip = _clip_of(given.source, given, sampling)
        begun(clip)
        return _prepared(given.source, clip, prepare)
    prepared = dict[int, T]()
    clips = list[SampledFrames]()

    def receive(number: int, image: Image.Image, _: float, about: dict[str, Any]) -> bool:
        clip = _clip(about)
        if clip is None or not 1 <= len(clip.numbers) <= most:
            return False
        if clip not in clips:
            clips.append(clip)
            begun(clip)
        if sampling.padded and -1 not in prepared:
            prepared[-1] = prepare(Image.new("RGB", image.size))
        prepared[number] = prepare(image)
        return len(prepared) <= 2 * most + 1

    name, result = _decoded(CHILD, given.source, receive, stopped, wanted=given.frames, sampling=asdict(sampling))
    order = result.get("frames") if isinstance(result, dict) else None
    if not clips or not _is_whole(order, clips[-1], prepared):
        raise _broken(name)
    numbers = clips[-1].numbers
    if len(numbers) != most and (given.frames is not None or sampling.a_second is None):
        raise _broken(name)
    return [prepared[number] for number in numbers]


def _is_whole(order: object, clip: SampledFrames, frames: Mapping[int, object]) -> bool:
    """True if the frames that were read are those of the clip, in this order."""
    return order == [*clip.numbers] and frames.keys() >= {*clip.numbers}


def _clip_of(frames: NDArray[Any], video: Video, sampling: FrameSampling) -> SampledFrames:
    """The frames to sample of an array [frames, height, width, 3]. Raises ImageError if it is not a video."""
    from vtx.runtime.vision.video_child import USUAL_RATE, pixels_refused

    if frames.ndim == 4 and not len(frames):
        raise ImageError("the given video has no frames; give at least one")
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ImageError(
            f"an array of shape {list(frames.shape)} and type {frames.dtype} is not a video; give uint8 "
            "[frames, height, width, 3] RGB"
        )
    _, height, width, _ = frames.shape
    if height * width > MAX_FRAME_PIXELS:
        raise ImageError(pixels_refused("the given video", width, height, MAX_FRAME_PIXELS))
    rate = float(video.fps or USUAL_RATE)
    return SampledFrames(tuple(sampling.numbers(len(frames), rate, video.frames)), len(frames), rate)


def _prepared(frames: NDArray[Any], clip: SampledFrames, prepare: Callable[[Image.Image], T]) -> list[T]:
    """`prepare` of each sampled frame, once of those that are sampled twice; number -1 is a black one."""
    black = np.zeros_like(frames[0])
    images = {n: prepare(Image.fromarray(frames[n] if n >= 0 else black)) for n in sorted({*clip.numbers})}
    return [images[n] for n in clip.numbers]


def _clip(about: dict[str, Any]) -> SampledFrames | None:
    """The sampled frames that the child names with a frame; None if they are not valid."""
    places, count, rate = (about.get(name) for name in ("sampled", "count", "rate"))
    if not isinstance(places, list) or not all(type(place) is int for place in places):
        return None
    if not isinstance(count, int) or not isinstance(rate, float) or not 0 < rate < math.inf:
        return None
    return SampledFrames(tuple(places), count, rate)


def play(
    source: VideoFile,
    show: Callable[[Image.Image, float], None],
    stopped: Callable[[], bool],
    *,
    damaged: Callable[[str], None],
    slowest: float = 1.0,
) -> None:
    """`show` each frame of a video file and its time in seconds, until `stopped` returns True.

    `damaged` gets the reason instead of a frame that cannot be decoded. `show` may wait, to show a video at its own
    speed; the decoder waits with it, at most for the longest video shown at `slowest` times its speed. Raises as
    `load_frames`.
    """

    def receive(_: int, image: Image.Image, seconds: float, __: object) -> bool:
        show(image, seconds)
        return True

    _decoded(EVERY, source, receive, stopped, damaged=damaged, wait=MAX_VIDEO_SECONDS / slowest)


def _decoded(
    target: str,
    source: VideoFile,
    receive: Callable[[int, Image.Image, float, dict[str, Any]], bool],
    stopped: Callable[[], bool] | None,
    *,
    damaged: Callable[[str], None] | None = None,
    wait: float = 0.0,
    **wanted: Any,
) -> tuple[str, Any]:
    """The video's name and the result of `target`, whose frames `receive` gets: number, upright image, seconds, header.

    `receive` returns False for one too many, `damaged` gets reasons instead of frames. `wait`: seconds that they may
    take in total.
    """
    from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine
    from vtx.runtime.vision.video_child import MAX_THREADS

    with _opened(source) as (name, file):
        kind = container(file.read(HEAD_BYTES))
        if kind is None:
            raise ImageError(f"{name} is not a video of a known format; vtx reads {READABLE}, whatever the name says")

        def checked(frame: dict[str, Any], pixels: bytearray) -> None:
            if damaged is not None and isinstance(reason := frame.get("damaged"), str):
                return damaged(reason[:200])
            values: tuple[Any, ...] = tuple(frame.get(key) for key in ("number", "width", "height", "turns"))
            number, width, height, turns = values
            valid = all(type(value) is int for value in values)
            seconds = frame.get("seconds")
            if not valid or min(width, height) < 1 or 3 * width * height != len(pixels):
                raise _broken(name)
            stored = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
            image = np.rot90(stored[:, ::-1] if frame.get("mirrored") is True else stored, turns)
            at = float(seconds) if isinstance(seconds, float | int) and 0 <= seconds <= MAX_VIDEO_SECONDS else 0.0
            if not receive(number, Image.fromarray(np.ascontiguousarray(image)), at, frame):
                raise _broken(name)
            return None

        request = {
            "name": name,
            "container": kind,
            "codecs": CODECS,
            "seconds": MAX_VIDEO_SECONDS,
            "frames": MAX_VIDEO_FRAMES,
            "pixels": MAX_FRAME_PIXELS,
            **wanted,
        }
        limits = ChildLimits(
            memory=MAX_VIDEO_MEMORY,
            cpu_seconds=int(MAX_VIDEO_DECODE_SECONDS * MAX_THREADS),
            wall_seconds=MAX_VIDEO_DECODE_SECONDS + wait,
            file=3 * MAX_FRAME_PIXELS,
        )
        return name, confine(
            ChildTask(target, request, limits, LIBRARIES),
            Subject(name, ImageError, "save it again, shorter or smaller"),
            data=file,
            receive=checked,
            stopped=stopped,
        )


def _broken(name: str) -> ImageError:
    return ImageError(f"{name} makes its decoder return invalid frames; get it from a trusted source")


@contextmanager
def _opened(source: VideoFile) -> Iterator[tuple[str, BinaryIO]]:
    """The file, with its name for messages."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        with _in_memory(read_data_url(source, "video", MAX_VIDEO_BYTES)) as file:
            yield "the video in the data URL", file
        return
    if isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) > MAX_VIDEO_BYTES:
            raise _too_large("the given video")
        with _in_memory(source) as file:
            yield "the given video", file
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


def _in_memory(content: bytes | bytearray | memoryview) -> BinaryIO:
    """A file with these bytes, for a child process."""
    from vtx.runtime.host.confined import scratch

    file = scratch()
    file.write(content)
    file.seek(0)
    return file
