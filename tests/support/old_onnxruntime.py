"""What an onnxruntime before int8 K and V, or before TensorRT's graphs, cannot show; Python 3.10 ends at 1.23."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vtx.runtime.backends.ort.library import onnxruntime_release

_OPSET_24 = "this onnxruntime, before 1.24, computes no graphs of opset 24, and TensorRT's are checked on onnxruntime"
_INT8_KV = "this onnxruntime, before 1.27, cannot attend over K and V in int8"


def reasons(release: str) -> dict[str, str]:
    """Why tests are skipped with this release of onnxruntime, by what an error says; none where it lacks nothing."""
    here = f"this is {release};"  # a refusal of a release that a test made up is no reason to skip it
    minor = tuple(int(part) for part in release.split(".")[:2])
    found = {}
    if minor < (1, 24):
        found["Opset 24 is under development"] = _OPSET_24  # onnxruntime's own words
        found[f"graphs of the dialect trt need onnxruntime 1.24 or newer, {here}"] = _OPSET_24
    if minor < (1, 27):
        found[f"K and V in int8 need onnxruntime 1.27 or newer, {here}"] = _INT8_KV
    return found


REASONS = reasons(onnxruntime_release() or "0.0")


@contextmanager
def skipped_where_it_is_too_old() -> Iterator[None]:
    """Skip a test that ends with a refusal that this onnxruntime has for its age; with a newer one it fails."""
    try:
        yield
    except Exception as e:
        for refusal, reason in REASONS.items():
            if any(refusal in str(error) for error in _chain(e)):
                pytest.skip(reason)
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
