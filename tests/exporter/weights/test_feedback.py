"""Rounding with feedback from measured inputs: as GPTQ states it, and better on inputs that were not measured."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from vtx.exporter.weights.quantize import (
    DAMPING,
    RATIOS,
    Feedback,
    Floats,
    _search,
    _search_with_zeros,
    dequantise,
    quantise,
)
from vtx.runtime.bundle.spec.stored import Scheme


def weights(rows: int, width: int) -> Floats:
    return (np.random.default_rng(0).standard_normal((rows, width)) * 0.02).astype(np.float32)


def correlated_inputs(tokens: int, seed: int) -> Floats:
    """Inputs of 128 channels that share 16 directions, some large."""
    directions = np.random.default_rng(0).standard_normal((16, 128)) * np.geomspace(4, 0.1, 128)
    rng = np.random.default_rng(seed)
    noise = 0.1 * rng.standard_normal((tokens, 128))
    return (rng.standard_normal((tokens, 16)) @ directions + noise).astype(np.float32)


def stated_feedback(rows: Floats, inputs: Floats, storage: Scheme) -> Floats:
    """GPTQ as its Eq. 3 says, weight by weight, with scales and zero points of each block as it is reached."""
    moments = inputs.T.astype(np.float64) @ inputs
    moments /= moments.diagonal().mean()
    moments += DAMPING * np.eye(len(moments))
    squares = (moments.diagonal() / moments.diagonal().mean()).astype(np.float32)
    inverse, rest, out = np.linalg.inv(moments), rows.astype(np.float64), np.empty(rows.shape)
    for column in range(rows.shape[1]):
        span = slice(column, column + storage.block)
        if column % storage.block == 0:
            block = rest[:, None, span].astype(np.float32)
            if storage.zero_bits:
                _, step, zero = _search_with_zeros(block, squares[span])
            else:
                _, step = _search(block, np.abs(block).max(-1) / 7, -8, 7, RATIOS[4], squares[span])
                zero = np.zeros(step.shape)
        wide = step[:, 0].astype(np.float64)
        rounded = np.clip(np.rint(rest[:, column] / wide) + zero[:, 0], -8, 7) - zero[:, 0]
        out[:, column] = rounded * wide
        lost = (rest[:, column] - out[:, column]) / inverse[column, column]
        rest -= np.outer(lost, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return out.astype(np.float32)


@pytest.mark.parametrize("storage", [Scheme("I4", 64), Scheme("I4", 32, zero_bits=4)], ids=["64", "32"])
def test_feedback_rounds_as_the_paper_states_and_loses_less_on_other_tokens(storage: Scheme) -> None:
    rows, inputs = weights(24, 128), correlated_inputs(256, 1)
    feedback = Feedback.of(inputs)
    made = dequantise(*quantise(rows, storage, "w", feedback), storage)
    stated = stated_feedback(rows, inputs, storage)
    assert np.mean(np.abs(made - stated) > 1e-5) < 0.02, "more than ties are rounded otherwise"
    plain = dequantise(*quantise(rows, storage, "w"), storage)
    others = correlated_inputs(512, 2)
    errors = [float(np.square(others @ (restored - rows).T).sum()) for restored in (made, plain)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("storage", [Scheme("I4", 64), Scheme("I4", 32, zero_bits=4)], ids=["64", "32"])
def test_feedback_of_inputs_that_share_nothing_changes_nothing(storage: Scheme) -> None:
    rows = weights(8, 128)
    for inputs in (np.eye(128, dtype=np.float32), np.zeros((4, 128), np.float32)):
        parts = zip(quantise(rows, storage, "w", Feedback.of(inputs)), quantise(rows, storage, "w"), strict=True)
        for fed_back, plain in parts:
            np.testing.assert_array_equal(fed_back, plain)


@pytest.mark.parametrize("storage", [Scheme("I4", 64), Scheme("I4", 32, zero_bits=4)], ids=["64", "32"])
def test_rows_of_zeros_and_huge_channels_are_rounded_to_finite_numbers(storage: Scheme) -> None:
    rows, inputs = weights(8, 1024), np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    rows[0] = 0
    rows[1, 5] = 1e4
    inputs[:, 7] *= 1e5
    restored = dequantise(*quantise(rows, storage, "w", Feedback.of(inputs)), storage)
    assert np.isfinite(restored).all()
    assert not restored[0].any()
    assert abs(restored[1, 5] - 1e4) < 1e4 / 7


FACTORED = """
import json

import numpy as np
import torch

from vtx.exporter.weights.quantize import Feedback
from vtx.tools.common.memory import peak

inputs = np.random.default_rng(0).standard_normal((256, 3072)).astype(np.float32)
Feedback.of(inputs[:, :64])
before = peak()
Feedback.of(inputs)
print(json.dumps(peak() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_the_factor_is_in_memory_once() -> None:
    """With the inputs twice; numpy's factorisation takes seven times the matrix."""
    done = subprocess.run([sys.executable, "-c", FACTORED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 1.3 * 4 * (3072**2 + 256 * 3072) + 8e6
