"""Factors on the channels between a decoder's matrices that leave its results unchanged.

A matrix W with inputs x computes (W s)(x / s) for any factors s on its input channels. 1/s is folded into the
weight that scales these inputs, so graphs stay as they are: a norm's, or the output rows of the matrix before.
AWQ (arXiv 2306.00978, Eq. 2 and section 4).

Channels with large activations get large factors, s = mean(|x|)^alpha, and so a finer grid (Eq. 4 and 5). The alpha
with the least error of quantised products on measured inputs is used; 0, which changes nothing, is a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.weights.quantize import Feedback, dequantise, quantise
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits
from vtx.runtime.bundle.spec.stored import Scheme, scheme

Floats = NDArray[np.float32]
NOTHING: Mapping[str, TensorInfo] = {}
DELTA = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))


@dataclass(frozen=True, slots=True)
class Channels:
    """Matrices with the same inputs, and the weight before them that gets the inverse factors.

    `width` input channels are in heads of `head`; `sharing` neighbouring heads come from the same rows of `source`, and
    so share their factors.
    """

    readers: tuple[str, ...]
    source: str
    width: int
    head: int
    sharing: int = 1

    def spread(self, factors: Floats) -> Floats:
        """Factors of the source's channels [width / sharing] for the readers' channels [width]."""
        return np.repeat(factors.reshape(-1, self.head), self.sharing, 0).reshape(-1)

    def pooled(self, sizes: Floats) -> Floats:
        """Sizes of the readers' channels [width], averaged over channels that share a factor [width / sharing]."""
        means: Floats = sizes.reshape(-1, self.sharing, self.head).mean(1).reshape(-1)
        return means


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors of a weight [out, in] or [out]: `rows` [out], and `columns` [in] of a matrix.

    `sample` [tokens, in], float16 of any scale, in a file: what the matrix is multiplied by before it is scaled.
    """

    rows: Floats | None = None
    columns: Floats | None = None
    sample: TensorInfo | None = None

    def feedback(self) -> Feedback | None:
        """The feedback of the scaled matrix's inputs; None without a sample."""
        if self.sample is None:
            return None
        inputs = read_bits(self.sample).astype(np.float32)
        if self.columns is not None:
            inputs /= self.columns
        return Feedback.of(inputs)

    def apply(self, part: Floats, start: int) -> Floats:
        """A copy of `part`, the rows of a weight from row `start` on, scaled."""
        scaled = part if self.columns is None else part * self.columns
        if self.rows is None:
            return scaled
        rows = self.rows[start : start + len(part)]
        return scaled * (rows if part.ndim == 1 else rows[:, None])


def channels(c: TextConfig, layer: int) -> Iterator[Channels]:
    """Every set of channels of `layer`, counted from 1, that can take factors."""
    p = f"text.layers.{layer - 1}"
    readers = tuple(f"{p}.{matrix}.weight" for matrix in _mixer_matrices(c, layer))
    yield Channels(readers, f"{p}.input_layernorm.weight", c.hidden, c.hidden)
    if _values_are_its_own(c, layer):
        width = c.heads_of(layer)
        output = f"{p}.self_attn.o_proj.weight"
        yield Channels((output,), f"{p}.self_attn.v_proj.weight", c.heads * width, width, c.heads // c.kv_heads)
    norm = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
    gate_and_up = tuple(f"{p}.mlp.{part}_proj.weight" for part in ("gate", "up"))
    yield Channels(gate_and_up, f"{p}.{norm}.weight", c.hidden, c.hidden)
    ffn = c.ffn_of(layer)
    yield Channels((f"{p}.mlp.down_proj.weight",), gate_and_up[1], ffn, ffn)


def _mixer_matrices(c: TextConfig, layer: int) -> tuple[str, ...]:
    """The matrices of `layer` whose inputs are its first norm's outputs."""
    if layer in c.conv_layers:
        return ("conv.in_proj",) if c.delta is None else DELTA
    parts = ("qkv" if c.source(layer) == layer else "q") + "g" * c.head_gates
    return tuple(f"self_attn.{part}_proj" for part in parts)


def _values_are_its_own(c: TextConfig, layer: int) -> bool:
    """True if only the output matrix of `layer` reads what its value matrix computes, and no norm stands between."""
    if layer in c.conv_layers or c.v_norm:
        return False
    return [other for other in range(1, c.layers + 1) if c.source(other) == layer] == [layer]


def scalings(
    c: TextConfig, factors: Mapping[str, Floats], inputs: Mapping[str, TensorInfo] = NOTHING
) -> dict[str, Scaling]:
    """The scaling of each weight; `factors` and sampled `inputs` of sets of channels by the name of their source."""
    rows = dict[str, Floats]()
    columns = dict[str, Floats]()
    samples = dict[str, TensorInfo]()
    for layer in range(1, c.layers + 1):
        for group in channels(c, layer):
            if group.source in factors:
                group_factors = factors[group.source]
                columns |= dict.fromkeys(group.readers, group.spread(group_factors))
                rows |= dict.fromkeys((group.source, _bias(group.source)), np.reciprocal(group_factors))
            if group.source in inputs:
                samples |= dict.fromkeys(group.readers, inputs[group.source])
    changed = {*rows, *columns, *samples}
    return {name: Scaling(rows.get(name), columns.get(name), samples.get(name)) for name in changed}


def scaled_weights(c: TextConfig, precision: str) -> set[str]:
    """Names of the weights that factors may change in a decoder quantised to `precision`, biases included."""
    groups = [group for layer in range(1, c.layers + 1) for group in quantised_channels(c, layer, precision)]
    return {name for group in groups for name in (*group.readers, group.source, _bias(group.source))}


def quantised_channels(c: TextConfig, layer: int, precision: str) -> Iterator[Channels]:
    """The `channels` of a layer whose readers are quantised at `precision`."""
    return (group for group in channels(c, layer) if scheme(precision, (1, group.width)))


def _bias(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


ALPHAS = tuple(step / 10 for step in range(11))
TRIED = 256  # rows of a matrix, and measured tokens, whose products are computed for each alpha
TOKENS = 2048  # measured tokens whose products are kept by feedback
LARGEST = 128.0  # factor, and the inverse of the smallest: norms and hidden states stay far within half precision


def tried(rows: int) -> NDArray[np.int64]:
    """The indices of the tried rows of a matrix of `rows`, evenly spaced."""
    return np.unique(np.linspace(0, rows - 1, min(rows, TRIED)).astype(np.int64))


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
    channels: Channels, sizes: Floats, inputs: Floats, matrices: Sequence[Floats], schemes: Sequence[Scheme]
) -> tuple[float, Floats]:
    """Alpha and the factors of the source's channels with the least loss.

    `sizes` [in] are mean magnitudes of the inputs of `matrices`, some rows [n, in] of each reader, and `schemes` how
    they are stored; `inputs` [tokens, in] is a sample of the inputs. Raises ExportError if a weight is so large that no
    scale reaches it.
    """
    pooled = channels.pooled(sizes)
    outputs = [inputs @ matrix.T for matrix in matrices]

    def error(alpha: float) -> float:
        wide = channels.spread(factors_of(pooled, alpha))
        lost = 0.0
        for name, matrix, whole, storage in zip(channels.readers, matrices, outputs, schemes, strict=True):
            restored = dequantise(*quantise(matrix * wide, storage, name), storage) / wide
            size = np.square(whole).sum(1)
            difference = np.square(inputs @ restored.T - whole).sum(1)
            # Each token counts alike; Eq. 4 sums squared errors, and a few tokens of trained models are a thousand
            # times larger than others.
            shares = np.divide(difference, size, out=np.zeros_like(size), where=size > 0)
            lost += float(shares.mean(dtype=np.float64))
        return lost

    alpha = min(ALPHAS, key=error)
    return alpha, factors_of(pooled, alpha)
