"""One bundle's graphs, computed one at a time: a dialect's on onnxruntime, or those of a device's backend.

Every source takes the same inputs and gives the same names, so that two of them can be compared:

    embed    ids                     -> hidden
    vision   pixel_values            -> image_features
    stage    hidden                  -> present_key.N, present_value.N, query, hidden_out
    score    hidden (of its stage)   -> attention_sum, attention_max
    gate     hidden (of a question)  -> odds
    head     hidden                  -> logits

A backend gives no K, V or queries of its stages. All values are float32; K and V in int8 are multiplied with their
scales.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.backends.devices import choose, open_backend
from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.backends.ort.library import check_opset, check_release, load_onnxruntime, session_options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.graphs import DELTA_RUN
from vtx.runtime.bundle.spec.manifest import Manifest, StageSpec
from vtx.runtime.bundle.tensors import read_kv_scales, read_rope
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.host.machine import cores
from vtx.runtime.precision import KV_DTYPES
from vtx.runtime.vision.tokens import ImageTokens, TokenStates

Tensors = Mapping[str, NDArray[Any]]
Kind = Literal["embed", "vision", "stage", "score", "gate", "head"]
BACKENDS = tuple(device for device in ENGINES if device != "cpu")  # on the CPU, the dialect `ort` is that device


@dataclass(frozen=True, slots=True)
class GraphPart:
    """One graph of the model: its kind, and the number of its stage (from 0) or the K of its gate."""

    kind: Kind
    number: int = 0


class GraphSource(Protocol):
    """The graphs of one dialect, and the means to compute them."""

    name: str
    dialect: str
    compute: str

    def run(self, part: GraphPart, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """Compute one graph."""


def open_source(bundle: Bundle, name: str) -> GraphSource:
    """The source of that name: a dialect's, or a device's. Raises RequestError, BundleError, DeviceError."""
    if name in names.DIALECTS:
        return DialectSource(bundle, name)
    if name in BACKENDS:
        return BackendSource(open_backend(bundle, choose(bundle, name), None), bundle.manifest)
    raise RequestError(
        f"{name!r} cannot be compared; dialects on onnxruntime: {', '.join(names.DIALECTS)}; "
        f"devices: {', '.join(BACKENDS)}"
    )


def graph_file(manifest: Manifest, dialect: str, part: GraphPart) -> str:
    graphs = manifest.dialects[dialect]
    if part.kind == "stage":
        return graphs.stages[part.number]
    if part.kind == "gate":
        return manifest.gate_files(dialect)[part.number]
    file: str = getattr(graphs, part.kind)
    return file


class DialectSource:
    """Graphs of one dialect on onnxruntime's CPU provider; each is loaded to be run, then released."""

    compute = "f32"

    def __init__(self, bundle: Bundle, dialect: str) -> None:
        if dialect not in bundle.manifest.dialects:
            raise BundleError(
                f"{bundle.folder} holds no graphs of the {dialect!r} dialect; export it with --dialect ort,{dialect}"
            )
        self.name = self.dialect = dialect
        self._bundle = bundle
        self._manifest = bundle.manifest
        self._graphs = bundle.manifest.dialects[dialect]
        self._ort = load_onnxruntime()
        self._kv_type = names.kv_type(dialect, bundle.manifest.kv_dtype)
        check_opset(self._ort, dialect)
        check_release(self._ort, self._kv_type)
        self._scales = read_kv_scales(bundle) if KV_DTYPES[self._kv_type].scaled else {}
        self._rope = read_rope(bundle)
        self._shared = dict[str, NDArray[Any]]()  # K and V that later layers read, by their names as inputs

    def run(self, part: GraphPart, inputs: Tensors) -> dict[str, NDArray[Any]]:
        if part.kind == "stage":
            return self._run_stage(part.number, inputs)
        if part.kind == "score":
            return self._run_score(part.number, inputs)
        if part.kind == "vision":
            extras = contract.vision_extras(self._manifest, self.dialect, {})
            outputs = self._session_run(self._graphs.vision, {**inputs, **extras})
            return _of_image(ImageTokens.of(outputs, self._manifest.model.tower))
        outputs = self._session_run(graph_file(self._manifest, self.dialect, part), inputs)
        outputs.pop(names.BEST, None)  # logits that are nearly equal may be in another order elsewhere
        return outputs

    def _run_stage(self, number: int, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """A stage's outputs as they are compared: K and V of the filled slots in float32, hidden states last."""
        count = len(inputs[names.HIDDEN])
        values = dict[str, NDArray[Any]]()
        for name, value in self._stage(number, inputs).items():
            values[name] = value
            if value.ndim == 4 and name != names.STATE_OUT:  # K or V
                heads_first = value.swapaxes(1, 2) if self.dialect in names.TENSORRT else value
                values[name] = heads_first[:, :, :count].astype(np.float32)
                if self._scales:
                    layer = int(name.rsplit(".", 1)[1])
                    is_key = name == names.present_key(layer)
                    values[name] *= self._scales[(names.key_scale if is_key else names.value_scale)(layer)]
        last = [name for name in (names.QUERY, names.HIDDEN_OUT) if name in values]
        return {name: values[name] for name in (*(n for n in values if n not in last), *last)}

    def _run_score(self, number: int, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """The scores of the filled slots in a stage's last layer."""
        layer = self._manifest.stages[number].last
        outputs = self._stage(number, inputs)
        count = len(inputs[names.HIDDEN])
        feeds = {names.QUERY: outputs[names.QUERY], names.KEY: outputs[names.present_key(layer)]}
        feeds[names.TOTAL_SLOTS] = np.array([count], np.int32)
        if self._scales:
            feeds[names.KEY_SCALE] = self._scales[names.key_scale(layer)]
        assert self._graphs.score is not None
        return {name: value[:count] for name, value in self._session_run(self._graphs.score, feeds).items()}

    def _stage(self, number: int, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """A stage's outputs for a prompt in one chunk, with caches that are empty before it."""
        stage = self._manifest.stages[number]
        model = self._manifest.model
        count = len(inputs[names.HIDDEN])
        sources = () if stage.keeps else model.sources(stage.first, stage.last)
        feeds = {**inputs, **self._positions(count), **self._rope, **self._caches(stage, sources, count)}
        for name, value in self._slot_numbers(sources, count).items():
            feeds[name] = np.array([value], np.int32)
        if self._scales:
            for layer in stage.cached or sources:
                for name in (names.key_scale(layer), names.value_scale(layer)):
                    feeds[name] = self._scales[name]
        outputs = self._session_run(self._graphs.stages[number], feeds)
        for layer in {*stage.cached} & {*model.sources(model.shared or 1, model.layers)}:
            self._shared[names.past_key(layer)] = outputs[names.present_key(layer)]
            self._shared[names.past_value(layer)] = outputs[names.present_value(layer)]
        return outputs

    def _caches(self, stage: StageSpec, sources: Sequence[int], count: int) -> dict[str, NDArray[Any]]:
        """A stage's inputs from caches before a prompt of `count` tokens: its own are empty."""
        model = self._manifest.model
        slots = count if self.dialect in names.IN_PLACE else 0
        heads = model.kv_heads
        sizes = (slots, heads) if self.dialect in names.TENSORRT else (heads, slots)
        caches = dict[str, NDArray[Any]]()
        for layer in stage.cached:
            for name in (names.past_key(layer), names.past_value(layer)):
                caches[name] = np.zeros((1, *sizes, model.heads_of(layer)), self._kv_type)
        for layer in sources:
            for name in (names.past_key(layer), names.past_value(layer)):
                caches[name] = self._shared[name]
        if not stage.stateful:
            return caches
        if model.delta is not None and self.dialect in names.TENSORRT and count > DELTA_RUN:
            raise BundleError(
                f"the golden prompt has {count} tokens, the {self.dialect!r} graphs of this model take {DELTA_RUN} "
                "at once; compare with the device: --compare ort,tensorrt"
            )
        caches[names.STATE] = np.zeros((len(stage.stateful), 1, model.state_numbers), np.float32)
        caches[names.STATE_ENDS] = np.array([count], np.int64)  # the state after the last token is compared
        return caches

    def _slot_numbers(self, sources: Sequence[int], count: int) -> dict[str, int]:
        """The inputs of a stage that number its slots, or those of the layers that it reads."""
        numbers = {names.LAST_SLOT: count - 1, names.TOTAL_SLOTS: count}
        inputs = names.SLOTS[self.dialect]
        if sources and inputs:
            return {names.source_slot(layer): count - 1 for layer in sources}
        return {name: numbers[name] for name in inputs}

    def _positions(self, count: int) -> dict[str, NDArray[Any]]:
        """The inputs of a stage that tell the positions of a prompt's tokens, and what each sees."""
        model = self._manifest.model
        positions = {names.POSITIONS: np.arange(count)[None]}
        if model.two_way:
            positions[names.SEEN_SLOTS] = np.arange(1, count + 1)[None]
        if model.sliding is not None:
            positions[names.FIRST_SLOT] = np.maximum(np.arange(count) - model.sliding.window + 1, 0)[None]
        return positions

    def _session_run(self, graph: str, inputs: Tensors) -> dict[str, NDArray[Any]]:
        try:
            options = session_options(self._ort, cores())
            path = os.fspath(self._bundle.path(graph))
            session = self._ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            outputs = [output.name for output in session.get_outputs()]
            return dict(zip(outputs, session.run(outputs, dict(inputs)), strict=True))
        except Exception as e:
            raise BundleError(f"onnxruntime cannot run {graph}: {' '.join(str(e).split())[:300]}") from e


def _of_image(image: ImageTokens) -> dict[str, NDArray[Any]]:
    """An image's tokens, and what the vision graph gives stages of each in addition."""
    signals = image.patches.signals.items()
    return {names.FEATURES: image.hidden} | {name: x for name, x in signals if name.startswith(names.TOKEN_INPUT)}


class BackendSource:
    """The graphs of a device's backend."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self.name = backend.device
        self.dialect = backend.dialect
        self.compute = backend.compute
        self._backend = backend
        self._manifest = manifest
        self._caches = dict[int, StageCache]()  # by the layers that they hold

    def run(self, part: GraphPart, inputs: Tensors) -> dict[str, NDArray[Any]]:
        backend = self._backend
        if part.kind == "embed":
            tokens = backend.embed(inputs[names.IDS])
            return {names.HIDDEN: tokens.hidden} | {names.token_input(name): x for name, x in tokens.inputs.items()}
        if part.kind == "vision":
            return _of_image(backend.vision(inputs[names.PIXELS]))
        hidden = inputs[names.HIDDEN]
        if part.kind == "head":
            return {names.LOGITS: backend.head(hidden)}
        if part.kind == "gate":
            return {names.ODDS: backend.gate(part.number, hidden)}
        stage = self._manifest.stages[part.number]
        sources = () if stage.keeps else self._manifest.model.sources(stage.first, stage.last)
        cache = backend.stage(part.number, len(hidden), {layer: self._caches[layer] for layer in sources})
        self._caches |= dict.fromkeys(stage.cached, cache)
        extras = {
            name.removeprefix(names.TOKEN_INPUT): x for name, x in inputs.items() if name.startswith(names.TOKEN_INPUT)
        }
        out = np.array(cache.append(TokenStates(hidden, extras), np.arange(len(hidden)), query=part.kind == "score"))
        if part.kind == "stage":
            return {names.HIDDEN_OUT: out}
        total, largest = cache.attention()
        return {names.ATTENTION_SUM: np.array(total), names.ATTENTION_MAX: np.array(largest)}
