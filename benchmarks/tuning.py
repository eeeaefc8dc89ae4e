"""What `vtx-tune` gains on one model: `python benchmarks/tuning.py --model build/sibling/model --data build/scenes`.

Two targets by three seeds, then, at the first target and seed, each term of the loss alone, 100, 1,000 and 10,000
items, and gates in the loop with their control. All take the same number of steps, so fewer items are seen more often.
Every run is judged on items held out, at every K, before and after. Runs resume, and one that is done is not done
again; `--out`/tuning.json has all of them, the table one line each.

A few hundred items held out tell points apart, not halves of one. `--judge QUESTIONS.jsonl` measures the model and what
each run made of it on the same questions, of scenes that no run has seen: `--out`/judged.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vtx.exporter.calibration.calibrate import CalibrationOptions, calibrate
from vtx.exporter.calibration.source import open_source
from vtx.exporter.tuning.judge import MAX_DROP, compared
from vtx.exporter.tuning.options import Depths, LossWeights, Packing, Schedule, TuneOptions
from vtx.exporter.tuning.tune import open_workspace, run
from vtx.runtime.strict import json_value
from vtx.tools.calibration.choosing import Choosing
from vtx.tools.calibration.report import CalibrationReport, make_report
from vtx.tools.common.files import write_json
from vtx.tools.data.items import read_data

TERMS = {"both": LossWeights(), "kl": LossWeights(ce=0.0), "ce": LossWeights(kl=0.0)}


def runs(args: argparse.Namespace) -> Iterator[tuple[str, TuneOptions]]:
    base = TuneOptions(
        Depths.parse(args.targets[0]), str(args.model), str(args.data), items=args.items[1], held_out=args.held_out,
        schedule=Schedule(lr=args.lr, steps=args.steps, batch=args.batch),
        packing=Packing(10, max_new_tokens=8),
    )  # fmt: skip
    for target in args.targets:
        for seed in range(args.seeds):
            schedule = replace(base.schedule, seed=seed)
            yield f"k{target}-seed{seed}", replace(base, depths=Depths.parse(target), schedule=schedule)
    for name in ("kl", "ce"):
        yield f"k{args.targets[0]}-{name}-alone", replace(base, weights=TERMS[name])
    for items in (args.items[0], args.items[2]):
        yield f"k{args.targets[0]}-items{items}", replace(base, items=items)
    for name, share in (("gates", base.full_share), ("gates-control", 1.0)):
        yield f"k{args.targets[0]}-{name}", replace(base, gates=True, full_share=share)


def line(name: str, report: dict[str, Any]) -> str:
    judged, cost = report["judged"], report["cost"]
    earliest = judged["earliest_k"]
    return (
        f"{name:24} earliest K {earliest['before']} -> {earliest['after']}; full depth lost "
        f"{judged['full_depth_lost_points']:.1f} points; {cost['steps']} steps, {cost['seconds']:.0f} s"
    )


def judge_all(model: Path, data: Path, out: Path, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run's merged checkpoint beside the model, on all questions of `data`."""
    before = _curve(model, data, out / "judged" / "model")
    for name in names:
        curve = _curve(out / name / "merged", data, out / "judged" / name)
        yield name, json_value(compared(before, curve))


def _curve(model: Path, data: Path, out: Path) -> CalibrationReport:
    source, questions = open_source(str(model)), read_data(str(data), None, samples=10**6)
    measured = calibrate(source, questions, CalibrationOptions(k_from=2, max_new_tokens=8), out)
    return make_report(source.calibrated, questions.source, measured, Choosing(max_drop=MAX_DROP))


def judged_line(name: str, judged: dict[str, Any]) -> str:
    earliest = judged["earliest_k"]
    shares = "  ".join(
        f"{point['k'] or 'none'}:"
        + "".join(f" {100 * point[when]['right']['share']:.1f}" for when in ("before", "after"))
        for point in judged["curve"]
    )
    return f"{name:24} {judged['items']} questions, earliest K {earliest['before']} -> {earliest['after']}; {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="as demo/questions.py draws it, 1,250 scenes or more")
    parser.add_argument("--targets", nargs=2, default=["4", "6"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--items", type=int, nargs=3, default=[100, 1000, 10_000])
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--lr", type=float, default=2e-3, help="for a model as small as the demo's")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", help="runs whose name contains this")
    parser.add_argument("--judge", type=Path, help="questions with answers, about scenes that --data lacks")
    parser.add_argument("--out", type=Path, default=Path("build/tuning"))
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, options in runs(args):
        done = args.out / name / "report.json"
        if args.only and args.only not in name:
            continue
        if done.exists():
            results[name] = json.loads(done.read_text(encoding="utf-8"))
        else:
            work = open_workspace(options, args.out / name, print)
            results[name] = run(work, options, args.out / name, lambda *_: None, print)
        print(line(name, results[name]), flush=True)
        write_json(args.out / "tuning.json", results)
    if args.judge:
        judged = {}
        for name, found in judge_all(args.model, args.judge, args.out, list(results)):
            judged[name] = found
            print(judged_line(name, found), flush=True)
            write_json(args.out / "judged.json", judged)


if __name__ == "__main__":
    main()
