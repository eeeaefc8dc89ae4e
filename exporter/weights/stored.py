"""The location of a weight in a bundle: graphs point to it, and the exporter writes there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one weight: `file` is relative to the bundle, `dtype` a safetensors dtype.

    A quantised matrix [out, in] is I8, or I4 with two to a byte, and has float16 `scales` [out, blocks of a row].
    """

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    scales: StoredTensor | None = None
