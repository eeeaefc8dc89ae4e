"""From measurements to a report: figures per K with their spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vtx.runtime.strict import json_value
from vtx.tools.bench.ceilings.ceilings import MeasuredCeilings
from vtx.tools.bench.machine import Machine
from vtx.tools.bench.measure import Bench, BenchResult, K
from vtx.tools.bench.series import Series, spread
from vtx.tools.bench.work import Shares, shares

FORMAT = "vtx-bench-1"


@dataclass(frozen=True, slots=True)
class Depth:
    """The measurements at one K. `ms` are milliseconds by phase, None if the phase does not occur.

    `rest`: image tokens that stayed from it on. `prefill_stages` have those of the prompt in each stage, layers `first`
    to `last`.
    """

    k: K
    rest: int
    full_layers: int
    ms: Mapping[str, Series | None]
    prefill_stages: tuple[Mapping[str, Any], ...]
    kv_bytes: int
    kv_slots: tuple[int, ...]
    steady_bytes: int | None
    peak_bytes: int | None
    vision_flops: int
    prefill_flops: int
    decode_bytes: int
    shares: Shares | None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A measurement: milliseconds, bytes, and shares from 0 to 1.

    `model` is the bundle with its arithmetic, `weights_read_as` the precision that a token reads. `workload` has the
    tokens of the prompt, its image's included, and the number of repeats.
    """

    machine: Machine
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    interrupted: bool
    predicted_s: float
    load_ms: float
    loaded_bytes: int | None
    ceilings: MeasuredCeilings | None
    depths: tuple[Depth, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **json_value(self)}


def make_report(bench: Bench, result: BenchResult) -> BenchReport:
    ceilings = result.ceilings.report() if result.ceilings else None
    m = bench.model.manifest
    backend = bench.model.backend
    options = bench.options
    stats = next(iter(result.turns.values()))[0].stats
    return BenchReport(
        machine=result.machine,
        model={
            "bundle": bench.model.bundle.folder.name,
            "name": m.model.name,
            "layers": m.model.layers,
            "hidden": m.model.hidden,
            "precision": m.precision,
            "kv_dtype": m.kv_dtype,
            "weights_read_as": bench.counter.weights,
            "device": backend.device,
            "compute": backend.compute,
        },
        workload={
            "prompt_tokens": stats.prompt_tokens,
            "vision_tokens": stats.vision_tokens,
            **{name: getattr(options, name) for name in ("new_tokens", "repeats", "warmup", "threads")},
        },
        interrupted=result.interrupted,
        predicted_s=result.predicted_s,
        load_ms=bench.model.loaded.load_ms,
        loaded_bytes=result.loaded,
        ceilings=ceilings,
        depths=tuple(_depth(bench, result, k, ceilings) for k in bench.ks if k in result.turns),
    )


def _depth(bench: Bench, result: BenchResult, k: K, ceilings: MeasuredCeilings | None) -> Depth:
    turns = result.turns[k]
    stats = result.turns[k][0].stats
    switched = result.switched_ms.get(k)
    phases = ("vision", "prefill", "first_token", "decode_per_token")
    ms: dict[str, Series | None] = {
        "preprocess": spread([turn.preprocess_ms for turn in turns]),
        **{name: spread([turn.stats.timings_ms[name] for turn in turns]) for name in phases},
        "second_question": spread([turn.second_ms for turn in turns]),
        "second_at_another_k": spread(switched) if switched else None,
    }
    work = bench.counter.count(turns[0].prefill, turns[0].decode)
    stages = list[Mapping[str, Any]]()
    for number, stage in enumerate(bench.model.manifest.stages):
        sums = [sum(call.ms for call in turn.prefill if call.stage == number) for turn in turns]
        stages.append({"first": stage.first, "last": stage.last, "ms": spread(sums)})
    return Depth(
        k=k,
        rest=stats.rest,
        full_layers=stats.full_layers,
        ms=ms,
        prefill_stages=tuple(stages),
        kv_bytes=stats.kv_bytes,
        kv_slots=stats.kv_slots,
        steady_bytes=result.memory[k][0],
        peak_bytes=result.memory[k][1],
        shares=shares(work, ms, ceilings) if ceilings else None,
        **dataclasses.asdict(work),
    )
