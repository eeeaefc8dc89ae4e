"""Prepared views of a long video in a file without a name, so that memory holds one of them at a time."""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import ImageError


class FrameFile:
    """Arrays, float32: `add` writes them, and once `order` is set, they are read in it, one by one.

    With `together` this number, which must have one shape, is read at a time, as one array, the last of all again if
    some are missing. Its file is on disk, in the system's folder for temporary files, and goes with it. Safe for many
    readers.
    """

    def __init__(self, together: int | None = None) -> None:
        self.order: Sequence[int] = ()  # of the arrays' numbers, which may occur twice
        self._together = together
        self._written: list[tuple[int, tuple[int, ...]]] = []  # where each array begins, and its shape
        self._bytes = 0
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile(prefix="vtx-")  # noqa: SIM115 - as long as this
        weakref.finalize(self, self._file.close)

    def add(self, frame: NDArray[np.float32]) -> int:
        """Write an array; returns its number. Raises ImageError if the disk is full."""
        number = len(self._written)
        try:
            self._file.write(frame.tobytes())
            self._file.flush()
        except OSError as e:
            raise ImageError(
                f"{number + 1} frames of a video, {frame.nbytes:,} bytes each, do not fit into {tempfile.gettempdir()} "
                f"({e.strerror}); free some room there, or ask about fewer frames"
            ) from e
        self._written.append((self._bytes, frame.shape))
        self._bytes += frame.nbytes
        return number

    def __len__(self) -> int:
        return -(-len(self.order) // (self._together or 1))

    def __getitem__(self, place: int) -> NDArray[np.float32]:
        first = place * (self._together or 1)
        count = self._together or 1
        last = len(self.order) - 1
        written = [self._written[self.order[min(first + number, last)]] for number in range(count)]
        view = np.empty((count, *written[0][1]), np.float32)
        with self._lock:
            for frame, (start, _) in zip(view, written, strict=True):
                self._file.seek(start)
                self._file.readinto(frame.data.cast("B"))
        return view[0] if self._together is None else view

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[place] for place in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._bytes
