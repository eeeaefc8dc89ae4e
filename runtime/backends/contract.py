"""What each graph must take and give, by the manifest: compared when a graph is loaded, so that no run fails for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle import names
from vtx.runtime.bundle.manifest import Manifest, StageSpec
from vtx.runtime.errors import BundleError

Tensor = tuple[Sequence[int | None], str]  # sizes (None: any) and onnxruntime's word for the type
Contract = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # inputs and outputs
KV_WORDS = {"float32": "float", "float16": "float16", "int8": "int8"}  # numpy's words and onnxruntime's


def embed(m: Manifest) -> Contract:
    return {names.IDS: ([None], "int64")}, {names.HIDDEN: ([None, m.model.hidden], "float")}


def vision(m: Manifest, dialect: str) -> Contract:
    graphs, inputs = m.dialects[dialect], {names.PIXELS: ([None, 3, m.image.height, m.image.width], "float")}
    rows = None if graphs.vision_merges else m.model.vision_tokens
    outputs: dict[str, Tensor] = {names.FEATURES: ([None, rows, m.model.hidden], "float")}
    if graphs.vision_merges:
        inputs[names.TAU] = ([1], "float")
        outputs |= {names.PLACES: ([None], "int64"), names.MERGED: ([None], "int64")}
        outputs[names.SIMILARITY] = [None], "float"
    if graphs.vision_attention:
        outputs[names.CLS_ATTENTION] = ([None], "float")
    if graphs.vision_last_attention:
        outputs[names.CLS_ATTENTION_LAST] = ([None], "float")
    return inputs, outputs


def vision_extras(
    m: Manifest, dialect: str, extras: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Every extra input that the vision graph takes, [1] float32: as given, else the value that changes nothing."""
    taken = [name for name in vision(m, dialect)[0] if name != names.PIXELS]
    assert set(extras) <= set(taken), f"the vision graph takes {taken}, not {sorted(extras)}"
    return {name: extras.get(name, np.array([names.VISION_DEFAULTS[name]], np.float32)) for name in taken}


def stage(m: Manifest, spec: StageSpec, dialect: str) -> Contract:
    hidden: Tensor = ([None, m.model.hidden], "float")
    slots = m.max_context if dialect == "trt" else None
    table: Tensor = ([slots, m.model.head_dim // 2], "float")
    cache: Tensor = ([1, m.model.kv_heads, slots, m.model.head_dim], _kv_word(m, dialect))
    layers = range(spec.first, spec.last + 1)
    inputs = {names.HIDDEN: hidden, names.POSITIONS: ([1, None], "int64"), names.COS: table, names.SIN: table}
    inputs |= {name: ([1], "int32") for name in names.SLOTS[dialect]}
    inputs |= {name(n): cache for n in layers for name in (names.past_key, names.past_value)}
    if cache[1] == "int8":
        inputs |= {name(n): _scale(m) for n in layers for name in (names.key_scale, names.value_scale)}
    outputs = {name(n): cache for n in layers for name in (names.present_key, names.present_value)}
    if spec.query:
        outputs[names.QUERY] = ([None, m.model.heads * m.model.head_dim], "float")
    return inputs, {names.HIDDEN_OUT: hidden, **outputs}


def score(m: Manifest, dialect: str) -> Contract:
    key: Tensor = ([1, m.model.kv_heads, None, m.model.head_dim], _kv_word(m, dialect))
    query: Tensor = ([None, m.model.heads * m.model.head_dim], "float")
    inputs = {names.QUERY: query, names.KEY: key, names.TOTAL_SLOTS: ([1], "int32")}
    if key[1] == "int8":
        inputs[names.KEY_SCALE] = _scale(m)
    return inputs, {name: ([None], "float") for name in (names.ATTENTION_SUM, names.ATTENTION_MAX)}


def _kv_word(m: Manifest, dialect: str) -> str:
    return KV_WORDS[names.kv_type(dialect, m.kv_dtype)]


def _scale(m: Manifest) -> Tensor:
    return [1, m.model.kv_heads, 1, m.model.head_dim], "float"


def head(m: Manifest) -> Contract:
    return {names.HIDDEN: ([None, m.model.hidden], "float")}, {names.LOGITS: ([None, m.model.vocab], "float")}


def gate(m: Manifest) -> Contract:
    return {names.HIDDEN: ([None, m.model.hidden], "float")}, {names.ODDS: ([2], "float")}


def check(graph: str, session: Any, contract: Contract) -> None:
    """Raise BundleError unless a loaded graph takes and gives what its contract says."""
    for wanted, found in zip(contract, (session.get_inputs(), session.get_outputs()), strict=True):
        if {tensor.name for tensor in found} != set(wanted):
            raise BundleError(f"{graph} is not the graph that vtx.json says it is; export the bundle again")
        for tensor in found:
            sizes, kind = wanted[tensor.name]
            if tensor.type != f"tensor({kind})" or not _fits(sizes, tensor.shape or ()):
                raise BundleError(
                    f"{graph}: {tensor.name} is {tensor.type} {tensor.shape}, vtx.json says {kind} {list(sizes)}; "
                    "export the bundle again"
                )


def _fits(wanted: Sequence[int | None], found: Sequence[Any]) -> bool:
    """Equal in every size that both sides name; a graph's free size is a string."""
    return len(wanted) == len(found) and all(
        a is None or not isinstance(b, int) or a == b for a, b in zip(wanted, found, strict=True)
    )
