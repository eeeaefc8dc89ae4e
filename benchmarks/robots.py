"""SmolVLA and pi0.5 at their published sizes with random weights: the time of a chunk of actions, beside LeRobot's.

    python -m benchmarks.robots make smolvla --lerobot PYTHON     # the checkpoint: 1 or 9 GB of disk
    python -m benchmarks.robots export smolvla                    # int4, with one K
    python -m benchmarks.robots measure --lerobot PYTHON          # on a quiet machine: 18 GB of memory for pi0.5
    python -m benchmarks.robots report --write                    # the table of docs/measurements

PYTHON has lerobot 0.6. Three cameras, ten steps of the expert, chunks of 50 actions; preparing pictures and words
counts. Processes take turns, one for each engine and K: `first` has new pictures, `next` the same with another state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import markdown, write_random, write_table
from benchmarks.robot_work import ROBOTS, WORDS, Pictures, Robot, chunks
from benchmarks.shape_files import CHATML, Shape, write_json, write_tokenizer

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.strict import json_value
from vtx.tools.bench.machine import describe

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/measurements/results/actions.jsonl"
ENGINES = {"openvino": "vtx, OpenVINO", "cpu": "vtx, onnxruntime"}
RESULTS = "results.jsonl"
COLUMNS = ["policy", "code", "K", "computed", "first chunk, s", "next chunk, s", "peak memory, MiB"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A side of the comparison: an engine of vtx at a K, or LeRobot, whose engine is ""."""

    engine: str
    k: int | None


def contenders(robot: Robot) -> list[Contender]:
    return [Contender(engine, k) for engine in ENGINES for k in (None, robot.k)] + [Contender("", None)]


def make(name: str, args: argparse.Namespace) -> None:
    robot, folder = ROBOTS[name], args.work / name / "checkpoint"
    if (folder / "model.safetensors").exists():
        return
    base = folder / robot.name
    base.mkdir(parents=True, exist_ok=True)
    write_json(base / "config.json", robot.base)
    sized = {"text_config": {"vocab_size": robot.vocab}}
    write_tokenizer(base, Shape(robot.title, sized, robot.specials, robot.roles, CHATML, "", {}, robot.k, 0, ""))
    of_lerobot(args, "describe", name, folder)
    shapes = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    tensors = [(tensor, tuple(shape)) for tensor, shape in shapes.items()]
    write_random(folder / "model.safetensors", tensors, deviation_and_mean=distribution)


def distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Deviation and mean of a tensor; norms of Gemma multiply by 1 more than their weights."""
    if len(shape) > 1:
        return float(np.prod(shape[1:])) ** -0.5, 0.0
    of_gemma = "paligemma_with_expert" in name and "vision_tower" not in name
    return 0.05, float("norm" in name and name.endswith("weight") and not of_gemma)


def export(name: str, args: argparse.Namespace) -> None:
    bundle = args.work / name / "bundle"
    if bundle.exists():
        return
    source = str(args.work / name / "checkpoint")
    options = ExportOptions(source, (ROBOTS[name].k,), "int4", dialects=("ort", "plain"))
    run_export(plan_export(options), bundle, force=False, report=lambda *_: None)


def answer(name: str, args: argparse.Namespace) -> None:
    """One process of vtx; prints a line of JSON."""
    robot, k = ROBOTS[name], args.k
    with load(args.work / name / "bundle", device=args.engine, threads=args.threads) as model:

        def act(pictures: Pictures, state: np.ndarray, noise: np.ndarray) -> np.ndarray:
            return model.act(pictures, WORDS, state, k=k, noise=noise)

        figures = chunks(robot, act)
        print(json.dumps({**figures, "how": f"int4 in {model.backend.compute}"}))


def measure(name: str, args: argparse.Namespace) -> None:
    """Rounds of every contender, each in a process of its own, beginning with another one each time."""
    if not (args.work / name / "bundle").exists():
        print(f"{name}: no bundle; run: python -m benchmarks.robots export {name}", file=sys.stderr)
        return
    order = contenders(ROBOTS[name])
    for number in range(args.rounds):
        for contender in order[number % len(order) :] + order[: number % len(order)]:
            about = {"robot": name, "engine": contender.engine, "k": contender.k, "round": number}
            if any(about.items() <= line.items() for line in lines(args.work)):
                continue
            if contender.engine:
                words = ["answer", name, "--work", args.work, "--engine", contender.engine, "--threads", args.threads]
                if contender.k is not None:
                    words += ["--k", contender.k]
                text = run(sys.executable, "-m", "benchmarks.robots", *words)
            else:
                text = of_lerobot(args, "measure", name, args.work / name / "checkpoint", args.threads)
            result = json.loads(text.splitlines()[-1])
            with (args.work / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **result, "machine": json_value(describe())}) + "\n")
            print(about, f"first {result['first']:.2f} s, next {result['next']:.2f} s", file=sys.stderr, flush=True)


def lines(work: Path) -> list[dict[str, Any]]:
    file = work / RESULTS
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def report(args: argparse.Namespace) -> None:
    """Print the table: medians, and the least and most of the rounds; write it where asked."""
    rows = list[list[Any]]()
    for name, robot in ROBOTS.items():
        for contender in contenders(robot):
            asked = {"robot": name, "engine": contender.engine, "k": contender.k}
            runs = [line for line in lines(args.work) if asked.items() <= line.items()]
            if runs:
                cells = [
                    [f"{of(run[part] for run in runs):.{digits}f}" for of in (statistics.median, min, max)]
                    for part, digits in (("first", 2), ("next", 2), ("rss", 0))
                ]
                code = ENGINES.get(contender.engine, "LeRobot")
                rows.append([robot.title, code, str(contender.k or "none"), runs[0]["how"], *cells])
    printed = [
        [cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]} to {cell[2]})" for cell in row] for row in rows
    ]
    print(markdown([COLUMNS, *printed]))
    if args.write:
        machine = lines(args.work)[-1]["machine"]
        caption = f"Random weights, int4, three cameras, ten steps. {machine['cpu']}"
        write_table(TABLE, "robots", caption, [COLUMNS, *rows], [])
        run(sys.executable, ROOT / "docs/measurements/tables.py")


def shown(cell: Any) -> str:
    """A text, or [median, least, most]."""
    return cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]} to {cell[2]})"


def of_lerobot(args: argparse.Namespace, *words: object) -> str:
    return run(args.lerobot, "-m", "benchmarks.robot_lerobot", *words)


def run(*words: object) -> str:
    """The output of a process in this repository's folder. Raises SystemExit if it fails."""
    done = subprocess.run([*map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}")
    return done.stdout


STEPS = {"make": make, "export": export, "answer": answer, "measure": measure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "report"])
    parser.add_argument("names", nargs="*", metavar="POLICY", help=f"[default: {', '.join(ROBOTS)}]")
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), default=Path("build/robots").resolve())
    parser.add_argument("--lerobot", default=sys.executable, metavar="PYTHON", help="one that has lerobot [this one]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", default="cpu", help="answer: vtx's")
    parser.add_argument("--k", type=int, help="answer: the first layer without the pictures")
    parser.add_argument("--write", action="store_true", help="report: write the table of docs/measurements, too")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.step == "report":
        return report(args)
    for name in args.names or ROBOTS:
        STEPS[args.step](name, args)


if __name__ == "__main__":
    main()
