"""The reference in float64, to tell whose rounding a difference is: every float32 in transformers' code is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.support.reference import Greedy, Inputs, Reference


class Float64(TorchFunctionMode):
    """What asks for float32 by name gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **named)


def wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class ExactReference:
    """A checkpoint's reference whose weights, tables, norms and softmax are float64, loaded when it is first asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _reference(self) -> Reference:
        return Reference(self._folder, torch.float64)

    def greedy(self, inputs: Inputs, k: int | None, n: int) -> Greedy:
        """As `Reference.greedy`, with logits in float64."""
        with in_float64():
            answer: Greedy = self._reference.greedy(inputs, k, n)
        assert answer.logits.dtype == torch.float64
        return answer
