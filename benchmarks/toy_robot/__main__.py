"""A small pi0 that learns to reach a named shape: how often does it, by K, trained without and with withdrawal?

    nice python -m benchmarks.toy_robot --out build/toy-robot              # three seeds, 15 minutes
    nice python -m benchmarks.toy_robot --out build/toy-robot --write      # and docs/measurements/results/actions.jsonl

Each seed trains two models of the same start on the same scenes (`tabletop.py`): one plainly, one whose image tokens
leave before a random layer in most batches. Each is exported and driven by `model.act`, at every K, over the same
episodes with the same noise. What is there already is not trained or measured again.
"""

from __future__ import annotations

import argparse
import json
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import parser, report
from benchmarks.toy_robot.judging import export, interval, reuse, success
from benchmarks.toy_robot.robot import Robot, Schedule, Shape, train

from vtx.runtime.api.load import load
from vtx.tools.common.files import write_json

ROOT = Path(__file__).parents[2]
KINDS = ("plain", "withdrawal")
COLUMNS = ("on the named shape, %", "each seed", "on another, %")


def one(out: Path, kind: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train, export and judge one model, or read what is there of it."""
    done = out / f"{kind}-{seed}.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    shape = Shape()
    ks = tuple(range(2, shape.layers + 1))
    print(f"{kind}, seed {seed}", flush=True)
    robot = Robot(shape, seed)
    schedule = Schedule(args.steps, args.batch, ks=ks if kind == "withdrawal" else ())
    trained = train(robot, schedule, seed)
    folder = out / f"{kind}-{seed}"
    bundle = export(robot.save(folder / "checkpoint"), folder / "bundle", ks)
    with load(bundle, device="cpu", threads=1) as model:
        cells = [success(model, args.episodes, k) for k in (None, *ks)]
        cells.append(success(model, args.episodes, None, elsewhere=True))
    made = {"kind": kind, "seed": seed, "training": asdict(schedule) | trained, "cells": cells}
    if seed == 0 and kind == KINDS[0]:
        made["reuse"] = reuse(bundle, args.episodes)
    print(json.dumps(made), flush=True)
    write_json(done, made)
    return made


def rows(found: dict[str, list[dict[str, Any]]], count: int) -> list[list[Any]]:
    """A row for each K and one for pictures of another table."""
    made = []
    for number, cell in enumerate(found[KINDS[0]][0]["cells"]):
        row: list[Any] = ["none, pictures of another table" if cell["elsewhere"] else str(cell["k"] or "none")]
        for kind in KINDS:
            cells = [run["cells"][number] for run in found[kind]]
            reached = [cell["reached"] for cell in cells]
            row += [list(interval(reached, count)), " ".join(f"{100 * n / count:.1f}" for n in reached)]
            row.append(f"{100 * np.mean([cell['other'] for cell in cells]) / count:.1f}")
        made.append(row)
    return made


def write(found: dict[str, list[dict[str, Any]]], table: list[list[Any]], count: int) -> None:
    """The results that the page is made from, and the page."""
    columns = ["K", *(f"trained {kind}: {what}" for kind in ("plainly", "with withdrawal") for what in COLUMNS)]
    head = {"table": "success", "columns": columns, "align": ["---"] * len(columns), "recorded": "2026-11"}
    runs = [run for kind in KINDS for run in found[kind]]
    lines = [head | {"episodes": count}, *({"table": "success", "row": row} for row in table)]
    lines += [{"table": "success", "run": run} for run in runs]
    path = ROOT / "docs/measurements/results/actions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    runpy.run_path(str(ROOT / "docs/measurements/tables.py"), run_name="__main__")


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind in KINDS:
            found[kind].append(one(args.out, kind, seed, args))
    table = rows(found, args.episodes)
    shown = [[c if isinstance(c, str) else f"{c[0]} ({c[1]} to {c[2]})" for c in row] for row in table]
    report({"runs": found}, [["K", *(f"{kind}: {what}" for kind in KINDS for what in COLUMNS)], *shown], args.json)
    if args.write:
        write(found, table, args.episodes)


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--out", type=Path, default=Path("build/toy-robot"), help="checkpoints, bundles and figures")
    options.add_argument("--seeds", type=int, default=3, help="2 to 10")
    options.add_argument("--steps", type=int, default=Schedule().steps, help="of a training")
    options.add_argument("--batch", type=int, default=Schedule().batch, help="scenes a step")
    options.add_argument("--episodes", type=int, default=200, help="at each K")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--write", action="store_true", help="write docs/measurements, too")
    main(options.parse_args())
