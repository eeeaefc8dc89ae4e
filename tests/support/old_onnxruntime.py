"""What an onnxruntime that is older than TensorRT's graphs cannot show: Python 3.10 has none newer than 1.23."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

REFUSAL = "Opset 24 is under development"  # onnxruntime before 1.24, of the dialect `trt`
REASON = "this onnxruntime, before 1.24, computes no graphs of opset 24, and TensorRT's are checked on onnxruntime"


@contextmanager
def skipped_where_it_refuses_opset_24() -> Iterator[None]:
    try:
        yield
    except Exception as e:
        if any(REFUSAL in str(error) for error in _chain(e)):
            pytest.skip(REASON)
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
