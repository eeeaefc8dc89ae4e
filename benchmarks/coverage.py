"""Accuracy against coverage: what a threshold on an answer's probability accepts, and how much of it is right.

    python -m benchmarks.coverage build/demo build/other --scenes 400 --json coverage.json

Of each drawn scene one colour is asked of a shape that it has once, and one of a shape that it lacks, to which no
choice is right. `vtx-eval exact ... --coverage` answers and makes the curve; intervals are over scenes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from vtx.tools.data.scenes import COLORS, SHAPES, Scene, photograph, random_scene

SEED = 9_000_000_000
TARGET = 0.95
SHOWN = (0.999, 0.99, 0.95, 0.9, 0.5, 0.0)  # thresholds of the table
NOTHING = "none of them"


def questions_of(scene: Scene, rng: random.Random) -> list[tuple[str, str]]:
    """Questions about a scene, each with its answer."""
    numbers = {shape: sum(thing.shape == shape for thing in scene.things) for shape in SHAPES}
    colors = {thing.shape: thing.color for thing in scene.things}
    single = [shape for shape, number in numbers.items() if number == 1]
    absent = [shape for shape, number in numbers.items() if number == 0]
    chosen = [rng.choice(shapes) for shapes in (single, absent) if shapes]
    return [(f"What color is the {shape}?", colors.get(shape, NOTHING)) for shape in chosen]


def write_questions(folder: Path, scenes: int) -> Path:
    """Images and a file of questions as `vtx-eval exact` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(scenes):
        rng = random.Random(SEED + number)
        scene = random_scene(rng)
        image = f"{number:04}.png"
        photograph(scene, rng).save(folder / image)
        for question, answer in questions_of(scene, rng):
            lines.append(json.dumps({"image": image, "question": question, "answer": answer}))
    file = folder / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def curve(bundle: Path, questions: Path, threads: int) -> tuple[list[dict[str, Any]], str]:
    """The points of a bundle's curve, and what vtx-eval says of the threshold that it finds."""
    command = [
        str(Path(sys.executable).with_name("vtx-eval")),
        "exact",
        str(questions),
        "--bundle",
        str(bundle),
        "--choices",
        ",".join(COLORS),
    ]
    command += ["--instruction", "", "--coverage", str(TARGET), "--no-times", "--json", "--device", "cpu"]
    command += ["--threads", str(threads), "--out", str(questions.parent / bundle.name)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    threshold = next(line for line in run.stderr.splitlines() if "accept" in line)
    return json.loads(run.stdout)["methods"][0]["coverage"], threshold


def main() -> None:
    from benchmarks.common import parser, report

    args = parser(__doc__ or "")
    args.add_argument("bundles", nargs="+", type=Path)
    args.add_argument("--scenes", type=int, default=400)
    args.add_argument("--work", type=Path, default=Path("build/coverage"), help="images, questions and answers")
    args.add_argument("--threads", type=int, default=1)
    options = args.parse_args()
    questions = write_questions(options.work, options.scenes)
    rows = [["model", *(f"from {threshold:g}" for threshold in SHOWN)]]
    figures = dict[str, Any]()
    for bundle in options.bundles:
        points, threshold = curve(bundle, questions, options.threads)
        figures[bundle.name] = {"points": points, "threshold": threshold}
        by_threshold = {point["threshold"]: point for point in points}
        rows.append([bundle.name, *(_cell(by_threshold[threshold]) for threshold in SHOWN)])
        print(f"{bundle.name}: {threshold}")
    report(figures, rows, options.json)


def _cell(point: dict[str, Any]) -> str:
    """The share of questions that are answered, and of right ones among them."""
    if point["accuracy"] is None:
        return "0.0%"
    accuracy, low, high = (100 * point[name] for name in ("accuracy", "low", "high"))
    return f"{100 * point['coverage']:.1f}%: {accuracy:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
