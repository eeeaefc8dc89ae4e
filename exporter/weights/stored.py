"""Where a weight lies in a bundle: graphs point there, and the exporter writes there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one weight lies in the bundle: `file` is relative to the bundle, `dtype` is safetensors' word.

    A quantised matrix [out, in] is I8, or I4 with two to a byte, and has float16 `scales` [out, blocks of a row].
    """

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    scales: StoredTensor | None = None
