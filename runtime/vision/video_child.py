"""A video in the confined process: its frames are counted, and the wanted ones decoded by PyAV.

A file's container is named to the decoder by its first bytes, so no playlist is followed; nothing else is opened on its
behalf, and only common codecs are decoded. Duration, frames and pixels are bounded before frames are
decoded. Frames are decoded one after the other, and only wanted ones leave, each as soon as it is decoded.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn

from vtx.runtime.errors import DeviceError, ImageError
from vtx.runtime.installing import install
from vtx.runtime.vision.decoding import conversion, decoded, decoder_options, fault, orientation
from vtx.runtime.vision.frame_sampling import FrameSampling

DECODERS = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}  # names of their own
MAX_THREADS = 4  # each has frames of its own in memory
USUAL_RATE = 24.0  # frames a second of videos that do not say theirs
RATE_TOLERANCE = 2  # frames, and 2% of many, by which a video may differ from its stated rate
Frames = Generator[tuple[dict[str, Any], list[Any]], None, dict[str, list[int]]]


def frames_of(request: dict[str, Any]) -> Frames:
    """Each sampled frame of the video on stdin: its number, size and orientation, and lines of RGB.

    With each come the numbers of all that are `sampled`, the `count` of the video's frames and their `rate` a second.
    Returns the numbers of the sampled `frames`, in their order. Frames yielded under other numbers were counted wrongly
    and are to be forgotten.

    Raises ImageError if it is not a video, damaged, or beyond a limit of the request; DeviceError if PyAV is missing.
    """
    file = _File(request)
    sampling = FrameSampling(**request["sampling"])
    number = request["wanted"]
    count = file.count()
    numbers = sampling.numbers(count, file.rate, number)
    frames = yield from file.decode(numbers, {"sampled": numbers, "count": count, "rate": file.rate})
    if frames < count and numbers[-1] >= frames:  # more packets than pictures, as some codecs have
        numbers = sampling.numbers(frames, file.rate, number)
        yield from file.decode(numbers, {"sampled": numbers, "count": frames, "rate": file.rate})
    return {"frames": numbers}


def all_frames(request: dict[str, Any]) -> Frames:
    """Every frame of the video on stdin, with its time in `seconds`; else as `frames_of`.

    Instead of a frame that is `damaged` comes the reason.
    """
    file = _File(request)
    yield from file.decode(range(file.count()), whole=False)
    return {"frames": []}


def _lines(frame: Any) -> list[Any]:
    """The pixels of a frame, RGB, without what its lines are padded with."""
    plane = frame.reformat(format="rgb24", **conversion()).planes[0]
    pixels = memoryview(plane)
    line = 3 * frame.width
    if plane.line_size == line:
        return [pixels[: line * frame.height]]
    return [pixels[y * plane.line_size :][:line] for y in range(frame.height)]


class _File:
    """The video on stdin."""

    def __init__(self, request: dict[str, Any]) -> None:
        try:
            import av
        except ImportError as e:
            raise DeviceError(f"reading video files needs PyAV; {install('video')}") from e
        self._av: Any = av
        self._name = str(request["name"])
        self._kind = str(request["container"])
        self._codecs = tuple(request["codecs"])
        self._seconds = request["seconds"]
        self._frames = request["frames"]
        self._pixels = request["pixels"]
        self.rate = USUAL_RATE  # frames a second

    def count(self) -> int:
        """The number of frames by their packets; checks everything that is known before decoding."""
        with self._container() as (container, stream):
            seconds = stream.duration * stream.time_base if stream.duration else (container.duration or 0) / 1_000_000
            if seconds > self._seconds:
                self._too_long(float(seconds))
            if stream.frames > self._frames:
                self._too_many()
            context = stream.codec_context
            if context is None:  # the file ends before it says how frames are coded
                self._damaged(0)
            self._check_codec(context.name)
            self._check_pixels(context.width, context.height)
            count, span = self._count_packets(container, stream)
            if count < stream.frames:
                self._damaged(count)
            if span > self._seconds:
                self._too_long(span)
            self.rate = _rate(count, span or float(seconds), float(stream.average_rate or 0))
        if not count:
            raise ImageError(f"{self._name} has no frames; save it again")
        return count

    def _count_packets(self, container: Any, stream: Any) -> tuple[int, float]:
        """The number of frames, and the seconds from the first one's begin to the last one's end; 0: not known."""
        count = 0
        begins = list[int]()
        ends = list[int]()
        for packet in container.demux(stream):
            count += bool(packet.size)
            if packet.size and packet.pts is not None:
                begins.append(packet.pts)
                ends.append(packet.pts + (packet.duration or 0))
            if packet.is_corrupt:
                self._damaged(count)
            if count > self._frames:
                self._too_many()
        if not count or len(begins) < count:
            return count, 0.0
        return count, float((max(ends) - min(begins)) * stream.time_base)

    def _check_codec(self, decoder: str) -> None:
        codec = DECODERS.get(decoder, decoder)
        if codec not in self._codecs:
            raise ImageError(
                f"{self._name} is coded as {codec!r:.40}; vtx decodes {', '.join(self._codecs)}; convert it"
            )

    def decode(
        self, wanted: Sequence[int], about: Mapping[str, Any] = MappingProxyType({}), *, whole: bool = True
    ) -> Generator[tuple[dict[str, Any], list[Any]], None, int]:
        """Yield the frames with these numbers, `about` with each; returns how many were decoded up to the last.

        A damaged one among them is an ImageError, or if the video need not be `whole`, yielded as such.
        """
        number = 0
        with self._container() as (container, stream):
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = min(MAX_THREADS, os.cpu_count() or 1)
            # Frames may have more pixels than the header says.
            stream.codec_context.options = decoder_options(stream.codec_context.name, self._pixels)
            size = None
            for frame, damage in decoded(container.demux(stream)):
                if damage is not None and whole and (frame is None or number in wanted):
                    self._damaged(number, fault(damage))
                if damage is not None and not whole:
                    yield {"damaged": fault(damage)}, []
                    number += frame is not None
                    continue
                size = size or (frame.width, frame.height)
                if (frame.width, frame.height) != size:
                    raise ImageError(
                        f"{self._name} changes its size from {size[0]}x{size[1]} to {frame.width}x{frame.height} at "
                        f"frame {number}; save it in one size"
                    )
                self._check_pixels(*size)
                if number in wanted:
                    mirrored, turns = orientation(frame)
                    header = {"number": number, "width": size[0], "height": size[1]}
                    header |= {"mirrored": mirrored, "turns": turns, "seconds": frame.time}
                    yield {**header, **about}, _lines(frame)
                number += 1
                if number > wanted[-1]:
                    break
        if not number:
            raise ImageError(f"{self._name} has no frame that can be decoded; save it again")
        return number

    @contextmanager
    def _container(self) -> Iterator[tuple[Any, Any]]:
        """The open file and its video stream; every error of the decoder is an ImageError."""

        def refuse(url: str, *_: Any) -> NoReturn:
            raise OSError(f"the video names another file, {url!r:.80}")

        file = sys.stdin.buffer
        file.seek(0)
        pictures = self._av.stream.Disposition.attached_pic  # a cover, not a video
        try:
            # Titles and the like are of no interest, and many are not UTF-8.
            with self._av.open(file, format=self._kind, io_open=refuse, metadata_errors="ignore") as container:
                streams = [s for s in container.streams.video if not s.disposition & pictures]
                if not streams:
                    raise ImageError(f"{self._name} has no video stream, only sound or data; give another file")
                yield container, streams[0]
        except (self._av.FFmpegError, EOFError, OSError) as e:
            if isinstance(e, MemoryError):
                raise
            reason = getattr(e, "strerror", None) or str(e)
            raise ImageError(f"{self._name} is damaged or cut off ({reason}); copy or save it again") from e

    def _check_pixels(self, width: int, height: int) -> None:
        if not 1 <= width * height <= self._pixels:
            raise ImageError(pixels_refused(self._name, width, height, self._pixels))

    def _damaged(self, frames: int, reason: str = "") -> NoReturn:
        why = f" ({reason})" if reason else ""
        raise ImageError(f"{self._name} is cut off or damaged after {frames} frames{why}; copy or save it again")

    def _too_long(self, seconds: float) -> NoReturn:
        raise ImageError(f"{self._name} takes {seconds:,.0f} seconds, the limit is {self._seconds:,}; cut it")

    def _too_many(self) -> NoReturn:
        raise ImageError(f"{self._name} has over {self._frames:,} frames, the limit; cut it")


def _rate(count: int, seconds: float, stated: float) -> float:
    """The frames a second of `count` frames in `seconds`: the stated number, unless the video takes longer or shorter.

    The last frame's length is often not known, and times are in milliseconds.
    """
    if not math.isfinite(stated) or stated <= 0:
        stated = 0.0
    if stated and (not seconds or abs(count - seconds * stated) <= RATE_TOLERANCE * max(1, count / 100)):
        return stated
    rate = count / seconds if seconds > 0 else 0.0
    return rate if math.isfinite(rate) and rate > 0 else stated or USUAL_RATE


def pixels_refused(name: str, width: int, height: int, most: int) -> str:
    return f"{name} has frames of {width}x{height} pixels; they may have 1 to {most:,}; save it smaller"
