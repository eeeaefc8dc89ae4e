"""Small video files, written by PyAV."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

FRAMES, RATE = 90, 30  # three seconds


def write_video(
    path: Path,
    *,
    codec: str = "mpeg4",
    frames: int = FRAMES,
    sound: bool = False,
    options: Any = None,
    top: int = 0,
    title: str = "",
) -> Path:
    """A video whose frame n has the brightness 2n, its upper half `top` more; with `sound` a sound track alone."""
    import av

    with av.open(str(path), "w", options=options or {}) as file:
        file.metadata["title"] = title
        stream = file.add_stream("aac", rate=8000) if sound else file.add_stream(codec, rate=RATE)
        if sound:
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 8000
            file.mux(stream.encode(frame))
        else:
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            file.start_encoding()
            for number in range(frames):
                picture = np.full((48, 64, 3), 2 * number, np.uint8)
                picture[:24] += top
                file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    return path


def moving(path: Path, *, frames: int, every: int, codec: str = "libx264") -> bytes:
    """A video of noise that moves, with a key frame `every` so many, and its content."""
    import av

    noise = np.random.default_rng(0).integers(0, 256, (60, 140, 3), dtype=np.uint8)
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", every
        stream.options = {"bf": "0", "preset": "ultrafast", "sc_threshold": "0", "keyint_min": str(every)}
        for number in range(frames):
            picture = np.ascontiguousarray(noise[number % 12 :][:48, number : number + 64])
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    return path.read_bytes()


def damage(content: bytearray, packet: int) -> None:
    """Make noise of the second half of a packet."""
    import av

    with av.open(io.BytesIO(bytes(content))) as file:
        whole = [bytes(part) for part in file.demux(video=0) if part.size][packet]
    half = len(whole) // 2
    at = content.index(whole) + half
    content[at : at + len(whole) - half] = np.random.default_rng(1).bytes(len(whole) - half)
