"""The search for factors on channels that quantisation loses less with: AWQ (arXiv 2306.00978, Eq. 4 and 5).

Channels that carry large activations get large factors, s = mean(|x|)^alpha, and so a finer grid. alpha is the one of
a few with the least error of the quantised products on measured inputs; 0 is among them and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.weights.quantize import dequantise, quantise
from vtx.exporter.weights.scaling import Channels, Floats
from vtx.runtime.bundle.spec.stored import Scheme

ALPHAS = tuple(step / 10 for step in range(11))
OUTPUTS = 256  # rows of a matrix that are tried, evenly spaced
TOKENS = 256  # of those measured, whose products are computed
LARGEST = 128.0  # factor, and its inverse: norms and hidden states stay far within half precision


def tried(rows: int) -> NDArray[np.int64]:
    """The rows of a matrix of `rows` that the search looks at."""
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
    """Alpha and the factors of the source's channels that lose least.

    `sizes` [in] are mean magnitudes of the inputs of `matrices`, some rows [n, in] of each reader; `inputs`
    [tokens, in] is a sample of them.

    Raises:
        ExportError: a weight is so large that no scale reaches it.

    """
    pooled, outputs = channels.pooled(sizes), [inputs @ matrix.T for matrix in matrices]

    def error(alpha: float) -> float:
        wide, lost = channels.spread(factors_of(pooled, alpha)), 0.0
        for name, matrix, whole in zip(channels.readers, matrices, outputs, strict=True):
            restored = dequantise(*quantise(matrix * wide, scheme, name), scheme) / wide
            lost += _lost(whole, inputs @ restored.T)
        return lost

    alpha = min(ALPHAS, key=error)
    return alpha, factors_of(pooled, alpha)


def _lost(whole: Floats, rounded: Floats) -> float:
    """The share of a token's squared outputs that differs, mean over the tokens.

    Each token counts alike, where Eq. 4 sums squared errors: in trained models a few are a thousand times larger.
    """
    size = np.square(whole).sum(1)
    lost = np.divide(np.square(rounded - whole).sum(1), size, out=np.zeros_like(size), where=size > 0)
    return float(lost.mean(dtype=np.float64))
