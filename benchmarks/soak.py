"""Resident memory over many questions: does a process that answers all day stay the size it was?

Each engine answers in a process of its own: questions of every length in turn, at every K, with and without reductions,
in conversations that are closed and opened again, with a chat and an abandoned answer among them. The curve of RSS
over the questions is what is shown; the last half should be flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from common import parser, report

ENGINES = {"cpu": "onnxruntime", "openvino": "OpenVINO"}
STEPS = 40  # points of the curve
MIB = 1 << 20


def soak(bundle: str, device: str, questions: int, threads: int) -> list[list[float]]:
    """[questions answered, RSS in MiB] from the first answer on."""
    import vtx
    from vtx.tools.data.scenes import draw, random_scene

    model, process = vtx.load(bundle, device=device, threads=threads), psutil.Process()
    ks = (None, *model.manifest.variants)
    specs = ("none", *model.manifest.reductions)
    pictures = [draw(random_scene(random.Random(seed)), 224) for seed in range(4)]
    curve: list[list[float]] = []
    for number in range(questions):
        if number % 20 == 0:
            image = model.open(pictures[number // 20 % len(pictures)])
            chat = image.chat(ks[number // 20 % len(ks)])
        words = "How many " + "red " * (number % 37) + "shapes are there?"
        if number % 20 == 7:
            chat.ask(words, max_new_tokens=8)
        elif number % 20 == 13:
            stream = image.stream(words, ks[number % len(ks)], max_new_tokens=8)
            next(stream, None)
            stream.close()
        else:
            image.ask(words, ks[number % len(ks)], reduce=specs[number % len(specs)], max_new_tokens=8)
        if number % max(1, questions // STEPS) == 0:
            curve.append([number + 1, process.memory_info().rss / MIB])
    return curve


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("bundle", help="a bundle, best the demo with reductions")
    args.add_argument("--questions", type=int, default=2000)
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--plot", type=Path, metavar="FILE.png")
    args.add_argument("--measure", help=argparse.SUPPRESS)
    given = args.parse_args()
    if given.measure:
        print(json.dumps(soak(given.bundle, given.measure, given.questions, given.threads)))
        return
    curves: dict[str, Any] = {}
    for device in ENGINES:
        command = [sys.executable, __file__, given.bundle, "--measure", device, "--questions", str(given.questions)]
        done = subprocess.run([*command, "--threads", str(given.threads)], capture_output=True, text=True, check=True)
        curves[device] = json.loads(done.stdout)
    rows = [["engine", "questions", "RSS after the first, MiB", "after half", "after all", "most in the last half"]]
    rows += [_row(device, curve) for device, curve in curves.items()]
    report({"questions": given.questions, "rss_mib": curves}, rows, given.json)
    if given.plot:
        _plot(curves, Path(given.bundle).resolve().name, given.plot)


def _row(device: str, curve: Sequence[Sequence[float]]) -> list[str]:
    sizes = [size for _, size in curve]
    half = len(sizes) // 2
    shown = (sizes[0], sizes[half], sizes[-1], max(sizes[half:]))
    return [device, f"{curve[-1][0]:.0f}", *(f"{size:.0f}" for size in shown)]


def _plot(curves: dict[str, Any], bundle: str, path: Path) -> None:
    from vtx.tools.bench.machine import describe
    from vtx.tools.common.plots import draw, headline

    def fill(figure: Any) -> None:
        axes = figure.subplots()
        for device, curve in curves.items():
            axes.plot([number for number, _ in curve], [size for _, size in curve], markersize=3, label=ENGINES[device])
        axes.set(xlabel="questions answered", ylabel="resident memory, MiB", ylim=(0, None))
        axes.legend()
        headline(figure, f"Memory of a process that answers questions: {bundle}", describe().cpu)

    draw(path, fill)


if __name__ == "__main__":
    main()
