"""Two sources of a bundle's graphs compared graph by graph, to find the first that differs.

Every graph of both gets the inputs that the first source computed before it, so a wrong graph does not make the
following ones wrong. The prompt is the golden one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.contract import embeddable
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.precision import ARITHMETIC, KV_DTYPES, PRECISIONS
from vtx.runtime.report.golden import DECODED_TOKENS, decoded_ids, read_golden
from vtx.runtime.report.graph_sources import GraphPart, GraphSource, Tensors, graph_file, open_source

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
        """The first output beyond its limit, or else the one nearest to its limit."""
        beyond = [output for output in self.outputs if not output.passed]
        return beyond[0] if beyond else max(self.outputs, key=lambda output: output.difference / output.limit)


def parse_sources(text: str) -> tuple[str, str]:
    """Two names of `A,B`, or RequestError."""
    parts = text.split(",")
    if len(parts) != 2 or parts[0] == parts[1]:
        raise RequestError(f"--compare {text!r} does not name two different sources; e.g. ort,plain")
    return parts[0], parts[1]


def compare(bundle: Bundle, first: str, second: str) -> Iterator[GraphDifference]:
    """Every graph that both sources have, in the order in which a prompt meets them."""
    reference = open_source(bundle, first)
    other = open_source(bundle, second)
    for part, inputs, limit in _cases(bundle, reference, other):
        graph = graph_file(bundle.manifest, other.dialect, part)
        if part.kind == "score":  # one graph, run after each of several stages
            graph += f" after layer {bundle.manifest.stages[part.number].last}"
        expected = reference.run(part, inputs)
        actual = other.run(part, inputs)
        outputs = list[TensorDifference]()
        for name, want in expected.items():
            if name in actual:
                got = actual[name]  # also for NaN, and other shapes
                difference = math.inf
                if want.shape == got.shape and not np.isnan(largest := float(np.abs(want - got).max())):
                    difference = largest / max(1e-9, float(np.abs(want).max()))
                outputs.append(TensorDifference(graph, name, difference, limit))
        yield GraphDifference(graph, tuple(outputs))


def to_dict(sources: tuple[str, str], graphs: list[GraphDifference]) -> dict[str, Any]:
    first = first_difference(graphs)
    outputs = [output.to_dict() for graph in graphs for output in graph.outputs]
    return {"compare": list(sources), "outputs": outputs, "first_difference": first and first.to_dict()}


def first_difference(graphs: list[GraphDifference]) -> TensorDifference | None:
    return next((graph.worst for graph in graphs if not graph.worst.passed), None)


def _cases(bundle: Bundle, reference: GraphSource, other: GraphSource) -> Iterator[tuple[GraphPart, Tensors, float]]:
    """Each graph with its inputs, computed by the reference, and its limit; all layers see the whole prompt."""
    m = bundle.manifest
    stored = read_golden(bundle)
    arithmetic = max(
        ARITHMETIC[s.compute].tolerance if s.compute in ARITHMETIC else F16_TOLERANCE for s in (reference, other)
    )
    vision_limit = max(arithmetic, PRECISIONS[m.vision_precision].tolerance)
    limit = max(arithmetic, KV_DTYPES[m.kv_dtype].tolerance, PRECISIONS[m.precision].tolerance)
    pixels = stored["pixels"].reshape(-1, *stored["pixels"].shape[-3:])[:1]  # of several views, the first

    yield GraphPart("vision"), {names.PIXELS: pixels}, vision_limit
    image = reference.run(GraphPart("vision"), {names.PIXELS: pixels})
    features = image[names.FEATURES][:DECODED_TOKENS]
    ids = embeddable(m, decoded_ids(stored["ids"], m.text.image_token_id, slice(0, len(features))))
    is_image = ids == m.text.image_token_id
    if not is_image.any():
        raise BundleError(f"{m.golden}: ids hold no image token; export the bundle again")
    text = {names.IDS: ids[~is_image]}
    yield GraphPart("embed"), text, limit
    hidden = np.empty((len(ids), m.model.hidden), np.float32)
    hidden[is_image] = features[: is_image.sum()]
    embedded = reference.run(GraphPart("embed"), text)
    hidden[~is_image] = embedded[names.HIDDEN]
    token_inputs = dict[str, NDArray[np.float32]]()  # to stages, of each token in addition
    for declared in m.token_inputs:
        name = names.token_input(declared.name)
        token_inputs[declared.name] = np.zeros((len(ids), declared.width), np.float32)
        for outputs, tokens in ((image, is_image), (embedded, ~is_image)):
            if name in outputs:
                token_inputs[declared.name][tokens] = outputs[name][: tokens.sum()]
    suffix = hidden[np.flatnonzero(is_image)[-1] + 1 :]
    for number, stage in enumerate(m.stages):
        if stage.first in m.gates:
            question = hidden[len(hidden) - len(suffix) :]
            yield GraphPart("gate", stage.first), {names.HIDDEN: question}, limit
        inputs = {names.HIDDEN: hidden} | {names.token_input(name): token_inputs[name] for name in stage.inputs}
        yield GraphPart("stage", number), inputs, limit
        if stage.query:
            yield GraphPart("score", number), inputs, limit
        hidden = reference.run(GraphPart("stage", number), inputs)[names.HIDDEN_OUT]
    if m.action is not None:  # its head is one step of an expert, which reads no hidden states
        return
    head_limit = max(limit, PRECISIONS[m.head_precision].tolerance)
    yield GraphPart("head"), {names.HIDDEN: hidden[-HEAD_TOKENS:]}, head_limit
