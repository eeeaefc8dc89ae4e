"""What choosing tokens of a clip saves in FLOPs, time and KV cache: at three budgets, with K and without.

    python benchmarks/make_checkpoint.py video-small build/video-small
    vtx-export --model build/video-small --k 9 --precision fp16 --dialect ort --out build/video-small-bundle
    python benchmarks/clips.py build/video-small-bundle --k 9 --threads 1 --rows build/clips.jsonl

A clip drawn here: a still of noise over which a square moves. Each setting answers in a conversation of its own, taking
turns, about frames that the tower has encoded once: the processor's time is that of choosing and of the decoder up to
the first token. `--rows` writes rows for the table of docs/measurements, `--json` all figures.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import bundle_parser, report

from vtx.runtime.api.load import load
from vtx.runtime.session.encoded_images import ImageCache
from vtx.runtime.vision.video import Video
from vtx.tools.bench.series import spread
from vtx.tools.bench.work import WorkCounter

BUDGETS = (0.5, 0.25, 0.1)
QUESTION = "What happens in the video?"


def film(frames: int, side: int, seed: int) -> Any:
    """Frames [frames, side, side, 3] of a still, over which a square of a quarter of the side moves."""
    random = np.random.default_rng(seed)
    square = side // 4
    clip = np.repeat(random.integers(0, 256, (1, side, side, 3), dtype=np.uint8), frames, 0)
    for number, frame in enumerate(clip):
        left = number * (side - square) // max(1, frames - 1)
        frame[side // 3 : side // 3 + square, left : left + square] = (255, 40, 0)
    return clip


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--k", type=int, required=True, help="the withdrawal behind each setting")
    args.add_argument("--frames", type=int, default=8)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--rows", type=Path, metavar="FILE", help="rows of the table as JSON lines")
    given = args.parse_args()
    specs = ["none", *(f"{name}:keep={keep}" for name in ("evs", "vidcom2") for keep in BUDGETS)]
    settings = [(spec, k) for k in ("none", given.k) for spec in specs]
    seconds: dict[Any, list[float]] = {setting: [] for setting in settings}
    stats: dict[Any, Any] = {}
    with load(given.bundle, device=given.device, threads=given.threads) as model:
        model.loaded.caches.images = ImageCache(1 << 30)
        counter = WorkCounter(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)
        clip = Video(film(given.frames, 224, given.seed), given.frames)
        start = time.process_time()
        with model.open(clip) as conversation:
            conversation.ask(QUESTION, "none", reduce="none", max_new_tokens=1)
        tower = time.process_time() - start
        for turn in range(given.rounds):
            for spec, k in settings[turn:] + settings[:turn]:
                with model.open(clip) as conversation:
                    start = time.process_time()
                    answer = conversation.ask(QUESTION, k, reduce=spec, max_new_tokens=1)
                    seconds[spec, k].append(time.process_time() - start)
                stats[spec, k] = answer.stats
        flops = {setting: counter.prompt(stats[setting]) for setting in settings}
        print(f"tower and first answer: {tower:.2f} s of the processor; {given.frames} frames")
    whole = settings[0]
    rows = list[list[Any]]()
    for (spec, k), of in seconds.items():
        names = [*([f"`{spec}`"] if spec != "none" else []), *([f"K = {k}"] if k != "none" else [])]
        middle = spread(of).median
        work = flops[spec, k]
        rows.append(
            [
                " + ".join(names) or "none",
                f"{stats[spec, k].vision_tokens:,}",
                f"{work / 1e9:,.0f}",
                f"{work / flops[whole]:.0%}",
                [f"{value:.2f}" for value in (middle, min(of), max(of))],
                f"{middle / spread(seconds[whole]).median:.0%}",
                f"{stats[spec, k].kv_bytes / 1e6:.1f} MB",
            ]
        )
    head = ["method", "tokens that enter", "GFLOPs", "relative GFLOPs", "CPU s", "relative CPU s", "KV cache"]
    cells = [[cell if isinstance(cell, str) else " ".join(cell) for cell in row] for row in rows]
    report({"clips": rows}, [head, *cells], given.json)
    if given.rows:
        lines = [json.dumps({"table": "clips", "row": row}, ensure_ascii=False) for row in rows]
        given.rows.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
