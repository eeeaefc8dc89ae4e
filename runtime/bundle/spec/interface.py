"""The interface of a bundle's graphs for runtimes in any language, declared in `vtx.json` and checked on reading.

All of it follows from the rest of the manifest and from `names.py`, so it is written and compared, and never stored.
"""

from __future__ import annotations

from typing import Any

from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import json_value

# The form of a stage's K and V: one buffer that a graph reads and writes, one that it reads and the runtime puts new
# tokens' into, or an output that is the next input.
CACHES = {
    **dict.fromkeys(names.IN_PLACE, "in place"),
    "plain": "grows",
    **dict.fromkeys(names.TENSORRT, "appended"),
}


def declare(m: Manifest) -> dict[str, Any]:
    return {
        "layers_from": 1,
        "kv_cache": {"axes": ["layer", "key or value", "kv_head", "slot", "head_dim"], "dtype": m.kv_dtype},
        "constants": {
            "class_token": names.CLASS_TOKEN,
            "merged": {"gone": names.GONE, "patch": names.PATCH, "window": names.WINDOW},
            "vision_defaults": dict(names.VISION_DEFAULTS),
            "odds": list(names.ODDS_ORDER),
        },
        "dialects": {dialect: _dialect(m, dialect) for dialect in m.dialects},
    }


def _dialect(m: Manifest, dialect: str) -> dict[str, Any]:
    stage = graphs.stage(m, dialect, query=False)
    entries = {
        "cache": CACHES[dialect],
        "kv_dtype": names.kv_type(dialect, m.kv_dtype),
        "vision": graphs.vision(m, dialect),
        "embed": graphs.embed(m),
        "stage": stage,
        "head": graphs.head(m, dialect),
    }
    if m.gates:
        entries["gate"] = graphs.gate(m)
    if m.dialects[dialect].video is not None:
        entries["video"] = graphs.video(m)
    if m.text_tower is not None:
        entries["text_tower"] = graphs.text_tower(m)
    if m.dialects[dialect].projector is not None:
        entries["projector"] = graphs.projector(m)
    if m.dialects[dialect].score is not None:
        entries["score"] = graphs.score(m, dialect)
        outputs = graphs.stage(m, dialect, query=True).outputs
        entries["stage_query"] = {name: tensor for name, tensor in outputs.items() if name not in stage.outputs}
    if m.token_inputs:
        reading = graphs.stage(
            m, dialect, query=False, reads=[token_input.name for token_input in m.token_inputs]
        ).inputs
        entries["token_inputs"] = {name: tensor for name, tensor in reading.items() if name not in stage.inputs}
    if m.model.conv_layers:
        keeping = graphs.stage(m, dialect, query=False, stateful="layers")
        for side, outputs, promised in (
            ("inputs", keeping.inputs, stage.inputs),
            ("outputs", keeping.outputs, stage.outputs),
        ):
            entries[f"state_{side}"] = {name: tensor for name, tensor in outputs.items() if name not in promised}
    declared: dict[str, Any] = json_value(entries)
    return declared


def check(m: Manifest, declared: Any) -> None:
    """Raise BundleError, naming the first difference, unless `declared` is the interface that this vtx knows."""
    problem = _difference(declare(m), declared, "interface")
    if problem:
        raise BundleError(f"vtx.json: {problem}; the bundle was altered or made by another vtx, export again")


def _difference(wanted: Any, declared: Any, where: str) -> str:
    if isinstance(wanted, dict) and isinstance(declared, dict):
        unknown = sorted(set(declared) - set(wanted))
        missing = sorted(set(wanted) - set(declared))
        if unknown or missing:
            return f"{where}: " + (f"unknown key {unknown[0]!r}" if unknown else f"key {missing[0]!r} is missing")
        problems = (_difference(wanted[key], declared[key], f"{where}.{key}") for key in wanted)
        return next(filter(None, problems), "")
    if isinstance(wanted, list) and isinstance(declared, list) and len(wanted) == len(declared):
        problems = (_difference(a, b, where) for a, b in zip(wanted, declared, strict=True))
        return next(filter(None, problems), "")
    same = type(wanted) is type(declared) and wanted == declared
    return "" if same else f"{where} is {str(declared)[:60]!r}, this vtx knows {str(wanted)[:60]!r}"
