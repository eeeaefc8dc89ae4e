"""Activation-aware scaling: the activations of some questions in the decoder, and the factors found from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.checkpoint.loader import check_finite
from vtx.exporter.weights.scaling import TOKENS, Channels, Floats, find_factors, quantised_channels, tried
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.bundle.safetensors import TensorInfo, parse_json, read_bits, read_header, widen_bf16, write_safetensors
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import CheckpointError, ExportError
from vtx.runtime.units import Progress, counter
from vtx.tools.data.items import Data

if TYPE_CHECKING:
    from torch import Tensor

    from vtx.exporter.reference.model import Sample

SAMPLES = 32  # questions measured; at 7B each takes a minute or more on two cores
FACTORS = ".factors.safetensors"
INPUTS = ".inputs.{}.safetensors"  # sampled inputs of a layer
NORM = "layernorm.weight"
# Channel factors by the weight that their inverse scales; and the items that they were measured on, their tokens
# (`rows`), and the mean exponent of each kind of matrix.
ChannelFactors = tuple[dict[str, NDArray[Any]], dict[str, Any]]


def read_factors(path: Path) -> ChannelFactors:
    header = read_header(path)
    record = parse_json(header.metadata.get("record", "").encode(), path.name, error=ExportError)
    return {name: read_bits(info) for name, info in header.tensors.items()}, record


def read_inputs(folder: Path) -> dict[str, TensorInfo]:
    """The sampled inputs in the files of `folder`, by the weight that scales them."""
    files = sorted(folder.glob(INPUTS.format("*")))
    return {name: info for file in files for name, info in read_header(file).tensors.items()}


def measure_factors(plan: Plan, data: Data, folder: Path, report: Progress) -> ChannelFactors:
    """Run the reference over the items of `data` and find every layer's factors. `report` gets (phase, done, total).

    In int4 the sampled inputs of each layer are written to `folder`.
    """
    import torch

    from vtx.exporter.reference.model import Reference, Sample, Watchers
    from vtx.exporter.reference.prompts import prepare
    from vtx.exporter.weights.tensors import CheckpointWeights

    source = plan.source()
    questions, skipped = prepare(source, data, 0)
    reference = Reference(plan.checkpoint, plan.config)
    layers = plan.config.text.layers
    count = counter(report, "activations", layers)
    done = 0
    count(0)
    with torch.inference_mode(), returning_memory():
        samples = list[Sample]()
        for q in questions:
            ids = q.ids if q.answer_ids is None else np.concatenate([q.ids, q.answer_ids])
            samples.append(Sample(ids, reference.encode(q.item.images, source.image)))
        search = _FactorSearch(plan, samples, CheckpointWeights(plan.checkpoint).read, folder)

        def layer(_: int) -> None:
            nonlocal done
            done += 1
            search.finish_layer(done)
            count(1)

        reference.hidden(samples, [None], layer, Watchers(feed=search.add))
    return search.factors, {
        "data": data.source,
        "items": len(questions),
        "skipped": len(skipped),
        "rows": sum(len(sample.ids) for sample in samples),
        "alpha": {kind: round(float(np.mean(alphas)), 3) for kind, alphas in search.alphas.items()},
    }


class _FactorSearch:
    """Finds the factors of one layer after the other, while the reference passes through them."""

    def __init__(self, plan: Plan, samples: Sequence[Sample], read: Callable[..., Tensor], folder: Path) -> None:
        self._folder = folder
        self._config = plan.config.text
        self._stored = plan.weights.stored
        self._read = read
        self._precisions = plan.precisions
        groups = [self._groups(layer) for layer in range(1, self._config.layers + 1)]
        self._first = {group.readers[0] for group in chain.from_iterable(groups)}
        is_vision = [sample.ids == plan.config.image_token_id for sample in samples]
        self._shares = shares(is_vision)
        self._drawn = drawn(is_vision)
        self._sizes: dict[str, Tensor] = {}  # by matrix, mean magnitudes of its inputs [in]
        self._inputs: dict[str, list[Floats]] = {}  # by matrix, a sample of its inputs [tokens, in]
        self.factors: dict[str, NDArray[Any]] = {}
        self.alphas: dict[str, list[float]] = {}

    def add(self, layer: int, number: int, name: str, inputs: Tensor) -> None:
        """Accumulate the `inputs` [n, in] that sample `number` brings to the matrix `name` of `layer`.

        Those of one matrix are kept of all that have the same.
        """
        matrix = f"text.layers.{layer - 1}.{name}.weight"
        if matrix not in self._first:
            return
        sizes = self._shares[number] @ inputs.abs()
        self._sizes[matrix] = self._sizes[matrix] + sizes if matrix in self._sizes else sizes
        self._inputs.setdefault(matrix, []).append(inputs[self._drawn[number]].numpy())

    def finish_layer(self, layer: int) -> None:
        """Find the factors of a layer that all samples have passed, write the sampled inputs, and drop all inputs."""
        sampled = dict[str, NDArray[np.float16]]()
        for group in self._groups(layer):
            sizes = self._sizes[group.readers[0]].numpy()
            if not np.isfinite(sizes).all():
                raise CheckpointError(
                    f"the inputs of {group.readers[0]} are NaN or infinite on the calibration's items; export "
                    "without --activation-aware: that checks every weight, and measures no activations"
                )
            matrices = [self._read(name, tried(self._stored[name].shape[0])).numpy() for name in group.readers]
            for name, matrix in zip(group.readers, matrices, strict=True):
                check_finite(matrix, name)
            schemes = [self._scheme(name) for name in group.readers]
            inputs = np.concatenate(self._inputs[group.readers[0]])
            alpha, factors = find_factors(group, sizes, inputs[tried(len(inputs))], matrices, schemes)
            self.alphas.setdefault(group.source.split(".", 3)[3], []).append(alpha)
            if alpha and group.source.endswith(NORM):  # as its weight is stored, so that no factor is lost to rounding
                norm = self._read(group.source).numpy()
                factors = exact_factors(norm, factors, self._stored[group.source].dtype)
            if alpha:
                self.factors[group.source] = factors
            if any(scheme.bits == 4 for scheme in schemes):  # of any scale, so that float16 holds them
                sample = inputs / max(float(np.abs(inputs).max()), 1e-30)
                sampled[group.source] = sample.astype(np.float16)
        if sampled:
            write_safetensors(self._folder / INPUTS.format(layer), sampled)
        self._sizes.clear()
        self._inputs.clear()

    def _groups(self, layer: int) -> Iterator[Channels]:
        return quantised_channels(self._config, layer, self._precisions.decoder)

    def _scheme(self, name: str) -> Scheme:
        """The scheme of a quantised matrix."""
        _, storage = self._precisions.stored(name, self._stored[name].shape, "F16")
        assert storage is not None, name
        return storage


def exact_factors(norm: Floats, factors: Floats, dtype: str) -> Floats:
    """Factors near `factors` that divide `norm` into numbers that `dtype`, named as in safetensors, holds exactly."""
    from vtx.exporter.weights.writing import narrow_bf16

    divided = norm / factors
    with np.errstate(over="ignore"):
        stored = widen_bf16(narrow_bf16(divided)) if dtype == "BF16" else divided.astype(np.float16).astype(np.float32)
    good = (stored != 0) & np.isfinite(stored)
    exact: Floats = np.where(good, norm / np.where(good, stored, 1), 1).astype(np.float32)
    return exact


def shares(is_vision: Sequence[NDArray[np.bool_]]) -> list[Tensor]:
    """The weight of each token of each sample: all text tokens together one half, all image tokens the other."""
    import torch

    whole = np.concatenate(is_vision)
    counts = np.array([(~whole).sum(), whole.sum()])
    each = 1 / np.maximum(counts, 1) / (counts > 0).sum()
    return [torch.from_numpy(each[kinds.astype(np.int64)].astype(np.float32)) for kinds in is_vision]


def drawn(is_vision: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.int64]]:
    """The tokens of each sample to compute products of: `TOKENS` in total, half of them text if there is enough."""
    whole = np.concatenate(is_vision)
    rng = np.random.default_rng(0)
    text = rng.permutation(np.flatnonzero(~whole))[: TOKENS // 2]
    kept = np.sort(np.concatenate([text, rng.permutation(np.flatnonzero(whole))[: TOKENS - len(text)]]))
    ends = np.cumsum([len(kinds) for kinds in is_vision])
    parts = np.split(kept, np.searchsorted(kept, ends))[:-1]
    return [part - start for part, start in zip(parts, [0, *ends], strict=False)]
