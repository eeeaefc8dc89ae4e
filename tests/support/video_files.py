"""Small video files, written by PyAV."""

from __future__ import annotations

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
