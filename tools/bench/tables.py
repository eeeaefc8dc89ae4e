"""Reports as text: what vtx-bench prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vtx.runtime.terminal.console import WideTable
from vtx.runtime.units import counted, size
from vtx.tools.bench.ceilings.ceilings import ProductRate
from vtx.tools.bench.compare import COSTS, PHASES, Compared, Comparison, MethodResult
from vtx.tools.bench.ladder import Best
from vtx.tools.bench.report import BenchReport, Depth
from vtx.tools.bench.series import Series, shown
from vtx.tools.data.intervals import ShareInterval

FIRST = ("vision", "prefill", "first_token", "second_question", "second_at_another_k", "decode_per_token")


def report_tables(report: BenchReport) -> list[str | WideTable]:
    """The report as paragraphs and tables: machine, model and workload, times, stages, memory."""
    model, work, depths = report.model, report.workload, report.depths
    heads = ["K", "full layers"]
    named = [[str(depth.k or "none"), str(depth.full_layers)] for depth in depths]
    cut_short = " INTERRUPTED: fewer repeats than requested." if report.interrupted else ""
    return [
        report.machine.in_words(),
        f"{model.name} ({model.bundle}), {model.layers} layers of {model.hidden}, "
        f"{model.precision} weights, on {model.device} in {model.compute} arithmetic with "
        f"{counted(work.threads, 'thread')}; a prompt of {work.prompt_tokens} tokens, {work.vision_tokens} of them "
        f"of the image, {work.new_tokens} new ones, {counted(work.repeats, 'repeat')}.{cut_short} "
        f"Loaded once in {report.load_ms:.0f} ms{_held(report.loaded_bytes)}.",
        WideTable(
            "milliseconds, medians with quartiles (extremes where there are fewer than four)",
            [*heads, *(name.replace("_", " ") for name in FIRST)],
            _with_names(named, depths, _times),
        ),
        WideTable(
            "prefill by stage, milliseconds", [*heads, *_stage_heads(depths)], _with_names(named, depths, _stage_times)
        ),
        WideTable("memory, and shares of the ceilings", [*heads, *MEMORY], _with_names(named, depths, _memory)),
        _ceilings(report),
    ]


MEMORY = ("KV cache", "memory held", "at most", "vision, of products", "prefill, of products", "a token, of reading")


def _with_names(
    named: Sequence[list[str]], depths: Sequence[Depth], cells: Callable[[Depth], list[str]]
) -> list[list[str]]:
    return [[*name, *cells(depth)] for name, depth in zip(named, depths, strict=True)]


def _times(depth: Depth) -> list[str]:
    return [_shown(depth.ms[name]) for name in FIRST]


def _stage_heads(depths: Sequence[Depth]) -> list[str]:
    return [f"layers {stage.first} to {stage.last}" for stage in depths[0].prefill_stages]


def _stage_times(depth: Depth) -> list[str]:
    return [shown(stage.ms) for stage in depth.prefill_stages]


def _memory(depth: Depth) -> list[str]:
    held = [_size(count) for count in (depth.kv_bytes, depth.steady_bytes, depth.peak_bytes)]
    reached = (depth.shares.vision, depth.shares.prefill, depth.shares.decode) if depth.shares else (None,) * 3
    return [*held, *(f"{share:.0%}" if share else "-" for share in reached)]


def _shown(series: Series | None) -> str:
    return shown(series) if series else "-"


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)


def _held(count: int | None) -> str:
    return "" if count is None else f", which takes {size(count)} of memory"


def _ceilings(report: BenchReport) -> str:
    ceilings = report.ceilings
    if not ceilings:
        return "No ceilings were measured, so no share of them is given."
    lines = [_product("", ceilings.gemm)]
    if ceilings.vision_gemm:
        lines.append(_product("for the tower ", ceilings.vision_gemm))
    lines.append(f"{ceilings.read.what}: {ceilings.read.bytes_per_s.max / 1e9:.1f} GB/s")
    return (
        f"Ceilings, the best of the rounds, in turn with the above: {'; '.join(lines)}. "
        f"A token is counted as reading {report.model.weights_read_as} weights."
    )


def _product(use: str, rate: ProductRate) -> str:
    return f"{use}{rate.what}: {rate.flops_per_s.max / 1e9:.1f} GFLOP/s"


# --- methods compared ----------------------------------------------------------------------------


def comparison_tables(report: Comparison) -> list[str | WideTable]:
    """The comparison as paragraphs and tables: machine, model and data, the methods, how they compare, the verdict."""
    model, data = report.model, report.data
    skipped = f", {len(data.skipped)} skipped" if data.skipped else ""
    cut_short = " INTERRUPTED: fewer questions than requested." if report.interrupted else ""
    parts: list[str | WideTable] = [
        report.machine.in_words(),
        f"{model.name}, {model.layers} layers, {model.vision_tokens} vision tokens an image, "
        f"{model.precision} weights, on {model.device} in {model.compute} arithmetic with "
        f"{counted(model.threads, 'thread')}; {counted(data.items, 'question')} of {data.source}{skipped}.{cut_short} "
        "Milliseconds are medians with quartiles, the rest means.",
        WideTable("", METHOD_HEADS, [_method_row(method) for method in report.methods]),
    ]
    if report.compared:
        parts += [
            "Each pruning method beside the withdrawal of nearest FLOPs, and the cheapest withdrawal that answers "
            "at least as many questions:",
            WideTable("", COMPARED_HEADS, [_compared_row(row) for row in report.compared]),
        ]
    for cost, rows in report.budgets.items():
        parts += [
            f"Each method's best setting within a share of {COSTS[cost]} without any, chosen by half of the questions "
            "and judged by the other half:",
            WideTable("", BUDGET_HEADS, [_budget_row(row, report.methods) for row in rows]),
        ]
    return [*parts, "\n".join(report.verdict)]


METHOD_HEADS = (
    "method", "right, %", "as none, %", "full layers", "vision tokens", "GFLOPs", "of none", "vision", "prefill",
    "first token", "second question", "per token", "layers reused", "KV cache",
)  # fmt: skip
COMPARED_HEADS = (
    "method", "withdrawal at its cost", "FLOPs, of the method's", "method better by, points", "the method is",
    "withdrawal as accurate", "FLOPs, of the method's",
)  # fmt: skip
BUDGET_HEADS = (
    "within", "best setting", "cost", "good answers, %", "behind, points", "first token", "second question",
    "per token", "layers reused", "KV cache",
)  # fmt: skip


def _budget_row(row: Best, methods: Sequence[MethodResult]) -> list[str]:
    method = next(method for method in methods if method.name == row.method)
    times = [_shown(method.ms[phase]) for phase in ("first_token", "second_question", "decode_per_token")]
    behind = [f"{100 * points:.1f}" for points in (row.behind.mean, row.behind.low, row.behind.high)]
    return [
        f"{row.budget:.0%}", row.method, f"{row.cost:.0%}", _percent(row.score),
        f"{behind[0]} ({behind[1]} to {behind[2]})", *times, f"{method.reused_layers:.1f}", size(method.kv_bytes),
    ]  # fmt: skip


def _method_row(method: MethodResult) -> list[str]:
    return [
        method.name, _percent(method.right), _percent(method.same), f"{method.full_layers:.1f}",
        f"{method.vision_rows:.1f}", f"{method.flops / 1e9:.3g}", f"{method.flops_ratio:.0%}",
        *(_shown(method.ms[phase]) for phase in PHASES), f"{method.reused_layers:.1f}", size(method.kv_bytes),
    ]  # fmt: skip


def _percent(share: ShareInterval | None) -> str:
    return "-" if share is None else f"{100 * share.share:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _compared_row(row: Compared) -> list[str]:
    points = [f"{100 * points:+.1f}" for points in (row.difference.mean, row.difference.low, row.difference.high)]
    equal = row.as_accurate
    return [
        row.method, row.withdrawal, f"{row.flops_ratio:.0%}", f"{points[0]} ({points[1]} to {points[2]})", row.verdict,
        *(["none of them", "-"] if equal is None else [equal.withdrawal, f"{equal.flops_ratio:.0%}"]),
    ]  # fmt: skip
