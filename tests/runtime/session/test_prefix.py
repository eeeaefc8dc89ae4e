"""Prefixes are compared by what their tokens are, each pair once."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from vtx.runtime.session.prefix import Key, Prefix


def prefix(*tokens: float) -> Prefix:
    """Text tokens before the decoder, each of a hidden state that is told by one number."""
    count = len(tokens)
    hidden = np.repeat(np.array(tokens, np.float32)[:, None], 4, 1)
    return Prefix(Key(), np.zeros(count, bool), (), np.arange(count, dtype=np.int64), count, hidden)


@pytest.mark.parametrize(
    ("tokens", "agreed"), [((1, 2, 3), 3), ((1, 2), 2), ((1, 2, 3, 4), 3), ((1, 9, 3), 1), ((9, 2, 3), 0), ((), 0)]
)
def test_prefixes_agree_up_to_the_first_token_that_differs(tokens: tuple[float, ...], agreed: int) -> None:
    assert prefix(1, 2, 3).agreement(prefix(*tokens)) == prefix(*tokens).agreement(prefix(1, 2, 3)) == agreed


@pytest.mark.slow
def test_two_prefixes_are_compared_once_and_neither_keeps_the_other() -> None:
    here, there = prefix(1, 2, 3), prefix(1, 2, 9)
    assert here.agreement(there) == 2
    there.hidden[:] = 0
    assert here.agreement(there) == 2, "every stage asks, and none of their arrays is read again"
    del there
    gc.collect()
    assert not here.agreements
