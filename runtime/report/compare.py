"""Two sources of a bundle's graphs compared graph by graph with Polygraphy: where the first difference arises.

Every graph of both gets the inputs that the first source computed before it, so one that is wrong does not make those
after it wrong. The prompt is the golden one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vtx.runtime.backends.contract import embeddable
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError, DeviceError, RequestError
from vtx.runtime.precision import ARITHMETIC, KV_DTYPES, PRECISIONS
from vtx.runtime.report.golden import DECODED_TOKENS, decoded_ids, read_golden
from vtx.runtime.report.graph_sources import (
    EMBED,
    GATE,
    HEAD,
    SCORE,
    STAGE,
    VISION,
    GraphPart,
    GraphSource,
    Tensors,
    graph_file,
    open_source,
)

HEAD_TOKENS = 4  # of the prompt's end
F16_TOLERANCE = 1e-2  # engines whose arithmetic is float16


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The largest difference of one output, as a share of the first source's largest magnitude, and its limit."""

    graph: str
    tensor: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit

    def to_dict(self) -> dict[str, Any]:
        number = self.difference if math.isfinite(self.difference) else None
        return {**asdict(self), "difference": number, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class GraphDifference:
    """One graph of both sources, by the second one's file: every output of both, in the order of the layers."""

    graph: str
    outputs: tuple[TensorDifference, ...]

    @property
    def worst(self) -> TensorDifference:
        """The first output beyond its limit, or else the one that comes nearest to it."""
        beyond = [output for output in self.outputs if not output.passed]
        return beyond[0] if beyond else max(self.outputs, key=lambda output: output.difference / output.limit)


@dataclass(frozen=True, slots=True)
class _GraphCase:
    """One graph with its inputs, and the largest difference that is allowed."""

    part: GraphPart
    inputs: Tensors
    limit: float


def parse_sources(text: str) -> tuple[str, str]:
    """Two names of `A,B`, or RequestError."""
    parts = text.split(",")
    if len(parts) != 2 or parts[0] == parts[1]:
        raise RequestError(f"--compare {text!r} does not name two different sources; write for example ort,plain")
    return parts[0], parts[1]


def compare(bundle: Bundle, first: str, second: str) -> Iterator[GraphDifference]:
    """Every graph that both sources have, in the order in which a prompt meets them.

    Raises:
        DeviceError: Polygraphy is not installed, or a device cannot answer.
        BundleError: no such dialect in the bundle, or its golden vectors are damaged.

    """
    _load_polygraphy()
    reference, other = open_source(bundle, first), open_source(bundle, second)
    for case in _cases(bundle, reference, other):
        graph = _label(bundle.manifest, other.dialect, case.part)
        yield GraphDifference(graph, tuple(_differences(reference, other, case, graph)))


def to_dict(sources: tuple[str, str], graphs: list[GraphDifference]) -> dict[str, Any]:
    """The comparison as plain data, ready for JSON."""
    first = first_difference(graphs)
    outputs = [output.to_dict() for graph in graphs for output in graph.outputs]
    return {"compare": list(sources), "outputs": outputs, "first_difference": first and first.to_dict()}


def first_difference(graphs: list[GraphDifference]) -> TensorDifference | None:
    """The first output beyond its limit; None where all are within."""
    return next((graph.worst for graph in graphs if not graph.worst.passed), None)


def _label(manifest: Manifest, dialect: str, part: GraphPart) -> str:
    """The graph's file; the score graph is computed once a scored stage, so it says after which layer."""
    file = graph_file(manifest, dialect, part)
    return f"{file} after layer {manifest.stages[part.number].last}" if part.kind == SCORE else file


# --- the inputs -----------------------------------------------------------------------------------


def _cases(bundle: Bundle, reference: GraphSource, other: GraphSource) -> Iterator[_GraphCase]:
    """Each graph with the inputs that the reference computes; the prompt goes through all layers whole."""
    m = bundle.manifest
    stored = read_golden(bundle)
    arithmetic = max(
        ARITHMETIC[s.compute].tolerance if s.compute in ARITHMETIC else F16_TOLERANCE for s in (reference, other)
    )
    vision_limit = max(arithmetic, PRECISIONS[m.vision_precision].tolerance)
    limit = max(arithmetic, KV_DTYPES[m.kv_dtype].tolerance, PRECISIONS[m.precision].tolerance)
    pixels = stored["pixels"].reshape(-1, *stored["pixels"].shape[-3:])[:1]  # of several views, the first

    vision = _GraphCase(GraphPart(VISION), {names.PIXELS: pixels}, vision_limit)
    yield vision
    features = reference.run(vision.part, vision.inputs)[names.FEATURES][:DECODED_TOKENS]
    ids = embeddable(m, decoded_ids(stored["ids"], m.text.image_token_id, len(features)))
    is_image = ids == m.text.image_token_id
    if not is_image.any():
        raise BundleError(f"{m.golden}: ids hold no image token; export the bundle again")
    embed = _GraphCase(GraphPart(EMBED), {names.IDS: ids[~is_image]}, limit)
    yield embed
    hidden = np.empty((len(ids), m.model.hidden), np.float32)
    hidden[is_image] = features[: is_image.sum()]
    hidden[~is_image] = reference.run(embed.part, embed.inputs)[names.HIDDEN]
    suffix = hidden[np.flatnonzero(is_image)[-1] + 1 :]
    for number, stage in enumerate(m.stages):
        if stage.first in m.gates:
            question = hidden[len(hidden) - len(suffix) :]
            yield _GraphCase(GraphPart(GATE, stage.first), {names.HIDDEN: question}, limit)
        yield _GraphCase(GraphPart(STAGE, number), {names.HIDDEN: hidden}, limit)
        if stage.query:
            yield _GraphCase(GraphPart(SCORE, number), {names.HIDDEN: hidden}, limit)
        hidden = reference.run(GraphPart(STAGE, number), {names.HIDDEN: hidden})[names.HIDDEN_OUT]
    yield _GraphCase(
        GraphPart(HEAD), {names.HIDDEN: hidden[-HEAD_TOKENS:]}, max(limit, PRECISIONS[m.head_precision].tolerance)
    )


# --- Polygraphy -----------------------------------------------------------------------------------


def _load_polygraphy() -> None:
    try:
        import polygraphy  # noqa: F401 - whether it is there
    except ImportError as e:
        raise DeviceError('vtx-doctor --compare needs polygraphy; pip install "polygraphy>=0.53.6"') from e


def _differences(
    reference: GraphSource, other: GraphSource, case: _GraphCase, graph: str
) -> Iterator[TensorDifference]:
    from polygraphy.comparator import Comparator, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    G_LOGGER.colors = False
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runners = [_runner(source, case) for source in (reference, other)]
        results = Comparator.run(runners, data_loader=[dict(case.inputs)])
        (wanted,), (given,) = results[reference.name], results[other.name]
        common = [name for name in wanted if name in given]
        largest = {name: max(1e-9, float(np.abs(wanted[name]).max())) for name in common}
        judge = SimpleCompareFunc(
            atol={name: case.limit * largest[name] for name in common}, rtol=0.0, check_error_stat="max"
        )
        (verdicts,) = Comparator.compare_accuracy(results, compare_func=judge)
    outputs = verdicts[reference.name, other.name][0]
    for name in common:
        verdict = outputs[name]
        # Polygraphy gives no numbers, only False, where the shapes differ.
        difference = math.inf if isinstance(verdict, bool) else verdict.max_absdiff / largest[name]
        difference = math.inf if math.isnan(difference) or (not verdict and difference <= case.limit) else difference
        yield TensorDifference(graph, name, difference, case.limit)


def _runner(source: GraphSource, case: _GraphCase) -> Any:
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    class SourceRunner(BaseRunner):  # type: ignore[misc]
        """One graph of a source, as Polygraphy runs it."""

        def get_input_metadata_impl(self) -> Any:
            return TensorMetadata().from_feed_dict(case.inputs)

        def infer_impl(self, feed_dict: Tensors) -> Any:
            import time

            started = time.perf_counter()
            outputs = source.run(case.part, feed_dict)
            self.inference_time = time.perf_counter() - started
            return outputs

    return SourceRunner(name=source.name)
