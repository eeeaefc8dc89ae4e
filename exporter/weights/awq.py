"""The search for factors on channels that reduce the loss of quantisation: AWQ (arXiv 2306.00978, Eq. 4 and 5).

Channels with large activations get large factors, s = mean(|x|)^alpha, and so a finer grid. The alpha with the least
error of quantised products on measured inputs is used; 0, which changes nothing, is one of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.weights.quantize import dequantise, quantise
from vtx.exporter.weights.scaling import Channels, Floats
from vtx.runtime.bundle.spec.stored import Scheme

ALPHAS = tuple(step / 10 for step in range(11))
OUTPUTS = 256  # tried rows of a matrix, evenly spaced
TOKENS = 256  # measured tokens whose products are computed
LARGEST = 128.0  # factor, and the inverse of the smallest: norms and hidden states stay far within half precision


def tried(rows: int) -> NDArray[np.int64]:
    """The indices of the tried rows of a matrix of `rows`."""
    return np.unique(np.linspace(0, rows - 1, min(rows, OUTPUTS)).astype(np.int64))


def factors_of(sizes: Floats, alpha: float) -> Floats:
    """Factors [channels] of mean magnitudes, 1 in the geometric mean; a channel of zeros keeps its size."""
    alive = sizes > 0
    if not alive.any():
        return np.ones_like(sizes)
    logs = np.log(sizes, where=alive, out=np.zeros_like(sizes))
    logs[alive] -= logs[alive].mean()
    factors: Floats = np.clip(np.exp(alpha * logs), 1 / LARGEST, LARGEST).astype(np.float32)
    return factors


def find_factors(
    channels: Channels, sizes: Floats, inputs: Floats, matrices: Sequence[Floats], scheme: Scheme
) -> tuple[float, Floats]:
    """Alpha and the factors of the source's channels with the least loss.

    `sizes` [in] are mean magnitudes of the inputs of `matrices`, some rows [n, in] of each reader; `inputs` [tokens,
    in] is a sample of them. Raises ExportError if a weight is so large that no scale reaches it.
    """
    pooled, outputs = channels.pooled(sizes), [inputs @ matrix.T for matrix in matrices]

    def error(alpha: float) -> float:
        wide, lost = channels.spread(factors_of(pooled, alpha)), 0.0
        for name, matrix, whole in zip(channels.readers, matrices, outputs, strict=True):
            restored = dequantise(*quantise(matrix * wide, scheme, name), scheme) / wide
            size, difference = np.square(whole).sum(1), np.square(inputs @ restored.T - whole).sum(1)
            # Each token counts alike; Eq. 4 sums squared errors, and a few tokens of trained models are a thousand
            # times larger than others.
            shares = np.divide(difference, size, out=np.zeros_like(size), where=size > 0)
            lost += float(shares.mean(dtype=np.float64))
        return lost

    alpha = min(ALPHAS, key=error)
    return alpha, factors_of(pooled, alpha)
