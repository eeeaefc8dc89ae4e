"""From measurements to a report: figures per K with their spread, as plain data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from vtx.exporter.bench.ceilings import GEMM, VISION_GEMM
from vtx.exporter.bench.machine import in_words
from vtx.exporter.bench.measure import Bench, BenchResult, K, Turn
from vtx.exporter.bench.series import Series, markdown, shown, spread
from vtx.exporter.bench.work import shares
from vtx.runtime.units import size

FORMAT = "vtx-bench-1"
FIRST = ("vision", "prefill", "first_token", "second_question", "second_at_another_k", "decode_per_token")


def make_report(bench: Bench, result: BenchResult) -> dict[str, Any]:
    """The whole report, ready for JSON: `ms` are milliseconds, `bytes` bytes, shares from 0 to 1."""
    model, manifest, options = bench.model, bench.model.manifest, bench.options
    stats = next(iter(result.turns.values()))[0].stats
    ceilings = result.ceilings.report() if result.ceilings else None
    return {
        "format": FORMAT,
        "machine": result.machine,
        "model": {
            "bundle": model.bundle.folder.name,
            **{name: getattr(manifest.model, name) for name in ("name", "layers", "hidden")},
            "precision": manifest.precision,
            "kv_dtype": manifest.kv_dtype,
            "weights_read_as": bench.counter.weights,
            "device": model.backend.device,
            "compute": model.backend.compute,
        },
        "workload": {
            "prompt_tokens": stats.prompt_tokens,
            "vision_tokens": stats.vision_tokens,
            **{name: getattr(options, name) for name in ("new_tokens", "repeats", "warmup", "threads")},
        },
        "interrupted": result.interrupted,
        "predicted_s": result.predicted_s,
        "load_ms": model.load_ms,
        "loaded_bytes": result.loaded,
        "ceilings": ceilings,
        "depths": [_depth(bench, result, k, ceilings) for k in bench.ks if k in result.turns],
    }


def _depth(bench: Bench, result: BenchResult, k: K, ceilings: Mapping[str, Any] | None) -> dict[str, Any]:
    turns, stats = result.turns[k], result.turns[k][0].stats
    switched = result.switched_ms.get(k)
    ms: dict[str, Series | None] = {
        "preprocess": _series(turns, lambda turn: turn.preprocess_ms),
        **{name: _series(turns, _timing(name)) for name in ("vision", "prefill", "first_token", "decode_per_token")},
        "second_question": _series(turns, lambda turn: turn.second_ms),
        "second_at_another_k": spread(switched) if switched else None,
    }
    work = bench.counter.count(turns[0].prefill, turns[0].decode)
    return {
        "k": k,
        "full_layers": stats.full_layers,
        "ms": ms,
        "prefill_stages": [
            {"first": stage.first, "last": stage.last, "ms": _series(turns, _in_stage(number))}
            for number, stage in enumerate(bench.model.manifest.stages)
        ],
        "kv_bytes": stats.kv_bytes,
        "kv_slots": list(stats.kv_slots),
        "steady_bytes": result.memory[k].steady,
        "peak_bytes": result.memory[k].peak,
        **dataclasses.asdict(work),
        "shares": shares(work, ms, ceilings) if ceilings else None,
    }


def _series(turns: list[Turn], ms: Callable[[Turn], float]) -> Series:
    return spread([ms(turn) for turn in turns])


def _timing(name: str) -> Callable[[Turn], float]:
    return lambda turn: turn.stats.timings_ms[name]


def _in_stage(number: int) -> Callable[[Turn], float]:
    return lambda turn: sum(call.ms for call in turn.prefill if call.stage == number)


# --- as text --------------------------------------------------------------------------------------


def in_tables(report: Mapping[str, Any]) -> str:
    """The report as text: machine, model and workload, and three Markdown tables."""
    model, work, depths = report["model"], report["workload"], report["depths"]
    heads = ["K", "full layers"]
    named = [[str(depth["k"] or "none"), str(depth["full_layers"])] for depth in depths]
    cut_short = " INTERRUPTED: fewer repeats than requested." if report["interrupted"] else ""
    return "\n\n".join(
        [
            in_words(report["machine"]),
            f"{model['name']} ({model['bundle']}), {model['layers']} layers of {model['hidden']}, "
            f"{model['precision']} weights, on {model['device']} in {model['compute']} arithmetic with "
            f"{work['threads']} threads; a prompt of {work['prompt_tokens']} tokens, {work['vision_tokens']} of them "
            f"of the image, {work['new_tokens']} new ones, {work['repeats']} repeats.{cut_short} "
            f"Loaded once in {report['load_ms']:.0f} ms{_held(report['loaded_bytes'])}.",
            "Milliseconds, medians with quartiles (extremes where there are fewer than four):",
            markdown([[*heads, *(name.replace("_", " ") for name in FIRST)], *_rows(named, depths, _times)]),
            "Prefill by stage, milliseconds:",
            markdown([[*heads, *_stage_heads(depths)], *_rows(named, depths, _stage_times)]),
            markdown([[*heads, *MEMORY], *_rows(named, depths, _memory)]),
            _ceilings(report),
        ]
    )


MEMORY = ("KV cache", "memory held", "at most", "of the matrix product: vision", "prefill", "of reading: a new token")


def _rows(
    named: list[list[str]], depths: list[dict[str, Any]], cells: Callable[[Mapping[str, Any]], list[str]]
) -> list[list[str]]:
    return [[*name, *cells(depth)] for name, depth in zip(named, depths, strict=True)]


def _times(depth: Mapping[str, Any]) -> list[str]:
    return [shown(depth["ms"][name]) if depth["ms"][name] else "-" for name in FIRST]


def _stage_heads(depths: list[dict[str, Any]]) -> list[str]:
    return [f"layers {stage['first']} to {stage['last']}" for stage in depths[0]["prefill_stages"]]


def _stage_times(depth: Mapping[str, Any]) -> list[str]:
    return [shown(stage["ms"]) for stage in depth["prefill_stages"]]


def _memory(depth: Mapping[str, Any]) -> list[str]:
    held = [_size(depth[name]) for name in ("kv_bytes", "steady_bytes", "peak_bytes")]
    reached = depth["shares"] or {}
    return [*held, *(f"{reached[n]:.0%}" if reached.get(n) else "-" for n in ("vision", "prefill", "decode"))]


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)


def _held(count: int | None) -> str:
    return "" if count is None else f", which takes {size(count)} of memory"


def _ceilings(report: Mapping[str, Any]) -> str:
    ceilings, weights = report["ceilings"], report["model"]["weights_read_as"]
    if not ceilings:
        return "No ceilings were measured, so no share of them is given."
    rates = {GEMM: ("", "FLOP"), VISION_GEMM: ("for the tower ", "FLOP"), "read": ("", "B")}
    lines = [_ceiling(*rates[name], ceilings[name]) for name in rates if name in ceilings]
    return (
        f"Ceilings, the best of the rounds, in turn with the above: {'; '.join(lines)}. "
        f"A token is counted as reading {weights} weights."
    )


def _ceiling(use: str, unit: str, ceiling: Mapping[str, Any]) -> str:
    series = ceiling["flops_per_s" if unit == "FLOP" else "bytes_per_s"]
    return f"{use}{ceiling['what']}: {series['max'] / 1e9:.1f} G{unit}/s"
