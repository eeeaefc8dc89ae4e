"""Activation-aware scaling: the activations of some questions in the decoder, and the factors found from them.

One pass of the plain reference, a layer in memory at a time; each layer's factors are settled before the next is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bundling.options import ActivationAware
from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.checkpoint.loader import check_finite
from vtx.exporter.weights.awq import TOKENS, find_factors, tried
from vtx.exporter.weights.scaling import Channels, Floats, quantised_channels
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.bundle.safetensors import parse_json, read_bits, read_header, widen_bf16, write_safetensors
from vtx.runtime.bundle.spec.stored import scheme
from vtx.runtime.errors import CheckpointError, ExportError
from vtx.runtime.strict import Strict, json_value

if TYPE_CHECKING:
    from torch import Tensor

    from vtx.exporter.reference.model import Reference, Sample
    from vtx.exporter.reference.prompts import PreparedItem
    from vtx.exporter.reference.source import Source

SAMPLES = 8  # questions measured; at 7B each takes a minute or more on two cores
FACTORS = ".factors.safetensors"
NORM = "layernorm.weight"
STRICT = Strict(ExportError, "remove the staging directory beside the output and export again")
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class FactorsRecord:
    """What factors were measured on: items and their tokens (`rows`), and the mean exponent of each kind of matrix."""

    data: str
    items: int
    skipped: int
    rows: int
    alpha: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Factors:
    """Channel factors by the weight that takes their inverse, and how they were measured, for the bundle's record."""

    by_source: Mapping[str, Floats]
    record: FactorsRecord

    def write(self, path: Path) -> None:
        tensors = {name: np.ascontiguousarray(factors) for name, factors in self.by_source.items()}
        write_safetensors(path, tensors, {"record": json.dumps(json_value(self.record))})

    @classmethod
    def read(cls, path: Path) -> Factors:
        header = read_header(path)
        factors = {name: read_bits(info) for name, info in header.tensors.items()}
        record = parse_json(header.metadata.get("record", "").encode(), path.name, error=ExportError)
        return cls(factors, STRICT.read(FactorsRecord, record, path.name))


def measure_factors(plan: Plan, aware: ActivationAware, report: Report) -> Factors:
    """Run the reference over the items of `aware` and find every layer's factors. `report` gets (phase, done, total).

    Raises:
        RequestError: too many items cannot be used.
        CheckpointError: the model computes NaN or infinity.

    """
    import torch

    from vtx.exporter.reference.model import Reference
    from vtx.exporter.reference.prompts import prepare
    from vtx.exporter.weights.tensors import CheckpointWeights

    source = plan.source()
    questions, skipped = prepare(source, aware.data, 0)
    reference, layers = Reference(plan.checkpoint, plan.config), plan.config.text.layers
    report("activations", 0, layers)
    with torch.inference_mode(), returning_memory():
        samples = [_sample(reference, source, question) for question in questions]
        search = _FactorSearch(plan, samples, CheckpointWeights(plan.checkpoint).read)
        done = 0

        def layer(count: int) -> None:
            nonlocal done
            done += count
            search.settle(done)
            report("activations", done, layers)

        reference.hidden(samples, [None], layer, feed=search.take)
    record = FactorsRecord(
        data=aware.data.source,
        items=len(questions),
        skipped=len(skipped),
        rows=sum(len(sample.ids) for sample in samples),
        alpha={kind: round(float(np.mean(alphas)), 3) for kind, alphas in search.alphas.items()},
    )
    return Factors(search.factors, record)


def _sample(reference: Reference, source: Source, question: PreparedItem) -> Sample:
    from vtx.exporter.reference.model import Sample

    ids = question.ids if question.answer_ids is None else np.concatenate([question.ids, question.answer_ids])
    return Sample(ids, reference.encode(question.item.images, source.image))


@dataclass(slots=True)
class _Taken:
    """The inputs of the readers of some channels: mean magnitudes [in], and a sample of the inputs [tokens, in]."""

    sizes: Tensor | float = 0.0
    inputs: list[Floats] = field(default_factory=list)


class _FactorSearch:
    """The factors of one layer after the other, while the reference passes through them."""

    def __init__(self, plan: Plan, samples: Sequence[Sample], read: Callable[..., Tensor]) -> None:
        self._config, self._stored, self._read = plan.config.text, plan.weights.stored, read
        self._precision, self._block = plan.precisions.decoder, plan.precisions.block
        is_vision = [sample.ids == plan.config.image_token_id for sample in samples]
        self._shares, self._drawn = shares(is_vision), drawn(is_vision)
        self._taken: dict[str, _Taken] = {}
        self.factors: dict[str, Floats] = {}
        self.alphas: dict[str, list[float]] = {}

    def take(self, layer: int, number: int, name: str, inputs: Tensor) -> None:
        """Accumulate the `inputs` [n, in] that sample `number` brings to the matrix `name` of `layer`."""
        taken = self._taken.setdefault(f"text.layers.{layer - 1}.{name}.weight", _Taken())
        taken.sizes = taken.sizes + self._shares[number] @ inputs.abs()
        taken.inputs.append(inputs[self._drawn[number]].numpy())

    def settle(self, layer: int) -> None:
        """Find the factors of a layer that all samples have passed, and drop its inputs."""
        for group in quantised_channels(self._config, layer, self._precision):
            alpha, factors = self._find(group, self._taken[group.readers[0]])
            self.alphas.setdefault(group.source.split(".", 3)[3], []).append(alpha)
            if alpha:
                self.factors[group.source] = self._as_stored(group.source, factors)
        self._taken.clear()

    def _find(self, group: Channels, taken: _Taken) -> tuple[float, Floats]:
        sizes = np.asarray(taken.sizes)
        if not np.isfinite(sizes).all():
            raise CheckpointError(
                f"the inputs of {group.readers[0]} are NaN or infinite on the calibration's items; export "
                "without --activation-aware: that checks every weight, and measures no activations"
            )
        matrices = [self._read(name, tried(self._stored[name].shape[0])).numpy() for name in group.readers]
        for name, matrix in zip(group.readers, matrices, strict=True):
            check_finite(matrix, name)
        storage = scheme(self._precision, matrices[0].shape, self._block)
        assert storage is not None
        return find_factors(group, sizes, np.concatenate(taken.inputs), matrices, storage)

    def _as_stored(self, source: str, factors: Floats) -> Floats:
        """The factors of a norm as they are once its weight is rounded, so that none of them is lost to rounding."""
        if not source.endswith(NORM):
            return factors
        return exact_factors(self._read(source).numpy(), factors, self._stored[source].dtype)


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
    """The tokens of each sample to compute products of: `TOKENS` in all, half of them text where there is enough."""
    whole, rng = np.concatenate(is_vision), np.random.default_rng(0)
    text = rng.permutation(np.flatnonzero(~whole))[: TOKENS // 2]
    kept = np.sort(np.concatenate([text, rng.permutation(np.flatnonzero(whole))[: TOKENS - len(text)]]))
    ends = np.cumsum([len(kinds) for kinds in is_vision])
    return [
        part - start for part, start in zip(np.split(kept, np.searchsorted(kept, ends))[:-1], [0, *ends], strict=False)
    ]
