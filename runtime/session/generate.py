"""The loop: prefill, then one token at a time. It knows no backend, text or clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.session.session import Session

Sample = Callable[[NDArray[np.float32]], int]


def generate(
    session: Session,
    logits: NDArray[np.float32],
    sample: Sample,
    *,
    end_ids: Collection[int],
    max_new_tokens: int,
    check: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yield token ids after a prefill that gave `logits`, the end token included.

    Stops there, after `max_new_tokens`, or when the context is full. `check` is called before each further token and
    may raise, to stop there.
    """
    for left in reversed(range(max_new_tokens)):
        token = sample(logits)
        yield token
        if not left or token in end_ids or session.length + 1 >= session.capacity:
            return
        check()
        logits = session.decode(token)
