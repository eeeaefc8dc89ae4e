"""What a cut of PyramidDrop in libvtx keeps."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.support.cpp import needs_cpp, output

pytestmark = needs_cpp


@pytest.mark.parametrize(
    ("tokens", "ratio", "layers", "cut"),
    [(576, 0.5, (8, 16, 24), 1), (576, 0.5, (8, 16, 24), 3), (2928, 0.3, (2, 5), 2), (101, 0.7, (3, 4, 9), 2),
     (100, 0.29, (3,), 1), (100, 0.7, (1, 2), 2), (16, 0.03, (2,), 1), (16, 1, (2,), 1)],
)  # fmt: skip
def test_a_cut_keeps_the_share_of_its_rank_and_of_equal_tokens_the_earlier(
    tokens: int, ratio: float, layers: tuple[int, ...], cut: int
) -> None:
    """Attention of few values, so that many tokens are equal; 29 of 100 is less than 29 in binary fractions."""
    attention = np.random.default_rng(tokens).integers(0, 6, tokens).astype(np.float32) / 6
    spec = f"pyramiddrop:ratio={ratio},layers={'/'.join(map(str, layers))}"
    found = output("probe", "cut", spec, str(layers[cut - 1] + 1), str(tokens), stdin=attention.tobytes())
    number = math.floor(round(tokens * ratio**cut, 6))
    assert json.loads(found) == sorted(sorted(range(tokens), key=lambda i: (-attention[i], i))[:number])
