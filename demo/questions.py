"""Drawn scenes with several questions each, as files: `python demo/questions.py --scenes 1000 --out build/scenes`.

What `vtx-tune`, `vtx-calibrate` and `vtx-train-gate` take: questions.jsonl and its pictures. The scenes are none that a
model of this folder was trained on or is judged by, and the first of them stay the same however many are drawn.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from vtx.tools.data.scene_questions import ask_some
from vtx.tools.data.scenes import photograph, random_scene

SEED = 6_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/scenes"))
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first scene")
    parser.add_argument("--questions", type=int, default=10, help="about each scene")
    parser.add_argument("--no-answers", action="store_true", help="leave the answers to the teacher")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "questions.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(args.first, args.first + args.scenes):
            rng = random.Random(SEED + number)
            scene = random_scene(rng)
            photograph(scene, rng).save(args.out / f"{number:05d}.png")
            for item in ask_some(scene, args.questions, rng):
                answer = {} if args.no_answers else {"answer": item.answer}
                record = {"image": f"{number:05d}.png", "question": item.question, **answer}
                lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
