"""Reports as text: what vtx-bench prints."""

from __future__ import annotations

from collections.abc import Sequence

from vtx.runtime.terminal.console import WideTable
from vtx.runtime.units import counted, size
from vtx.tools.bench.report import BenchReport, Depth
from vtx.tools.bench.series import Series, shown


def report_tables(report: BenchReport) -> list[str | WideTable]:
    """The report as paragraphs and a table: machine, model and workload, times and cache, what each K gains."""
    model = report.model
    work = report.workload
    depths = report.depths
    cut_short = " INTERRUPTED: fewer repeats than requested." if report.interrupted else ""
    memory_text = "" if report.loaded_bytes is None else f", which takes {size(report.loaded_bytes)} of memory"
    peaks = [depth.peak_bytes for depth in depths if depth.peak_bytes is not None]

    def row(depth: Depth) -> list[str]:
        first, *later = (depth.ms[name] for name in SHOWN)
        spread = "-" if first is None else shown(first, _digits(first.median))
        rest = f", rest {depth.rest}" if depth.rest else ""
        return [f"{depth.k or 'none'}{rest}", spread, *map(_median, later), size(depth.kv_bytes)]

    return [
        report.machine.in_words(),
        f"{model['name']} ({model['bundle']}), {model['layers']} layers of {model['hidden']}, "
        f"{model['precision']} weights, on {model['device']} in {model['compute']} arithmetic with "
        f"{counted(work['threads'], 'thread')}; a prompt of {work['prompt_tokens']} tokens, "
        f"{work['vision_tokens']} of them of the image, {work['new_tokens']} new ones, "
        f"{counted(work['repeats'], 'repeat')}.{cut_short} Loaded once in {report.load_ms:.0f} ms{memory_text}.",
        WideTable("milliseconds: medians (quartiles, or extremes of fewer than four)", HEADS, [*map(row, depths)]),
        "\n".join([*_gains(depths), *([f"Memory: at most {size(max(peaks))}."] if peaks else [])]),
        *_reached(report),
    ]


SHOWN = ("first_token", "vision", "prefill", "second_question", "decode_per_token")
HEADS = ("K", "first token", "vision", "prefill", "second", "a token", "KV cache")


def _gains(depths: Sequence[Depth]) -> list[str]:
    """One sentence for each K but none: how its times and its cache compare with those of none."""
    full = next((depth for depth in depths if depth.k is None), None)
    lines = list[str]()
    for depth in depths if full else ():
        if full is None or depth.k is None:
            continue
        times = []
        for name, words in (("first_token", "first token"), ("second_question", "second question")):
            before = full.ms[name]
            after = depth.ms[name]
            times += [f"{words} {before.median / after.median:.2f} times as fast"] if before and after else []
        cache = f"KV cache {full.kv_bytes / depth.kv_bytes:.1f} times smaller"
        lines.append(f"K = {depth.k} against none: {', '.join([*times, cache])}.")
    return lines


def _reached(report: BenchReport) -> list[str]:
    """Shares of the ceilings at each K, and the ceilings."""
    if report.ceilings is None:
        return ["No ceilings were measured, so no share of them is given."]
    lines = []
    for depth in report.depths:
        shares = {name: getattr(depth.shares, name, None) for name in ("vision", "prefill", "decode")}
        reached = [f"{share:.0%} in {name}" for name, share in shares.items() if share]
        lines.append(f"K = {depth.k or 'none'} reaches of the ceilings: {', '.join(reached) or '-'}.")
    products = [("", report.ceilings.gemm), ("for the tower ", report.ceilings.vision_gemm)]
    rates = [f"{use}{r.what}: {r.flops_per_s.max / 1e9:.1f} GFLOP/s" for use, r in products if r]
    rates.append(f"{report.ceilings.read.what}: {report.ceilings.read.bytes_per_s.max / 1e9:.1f} GB/s")
    ceilings = (
        f"Ceilings, the best of the rounds, in turn with the above: {'; '.join(rates)}. "
        f"A token is counted as reading {report.model['weights_read_as']} weights."
    )
    return ["\n".join(lines), ceilings]


def _digits(median: float) -> int:
    return 0 if median >= 100 else 1 if median >= 10 else 2


def _median(series: Series | None) -> str:
    return "-" if series is None else f"{series.median:.{_digits(series.median)}f}"
