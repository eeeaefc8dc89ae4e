"""Draw the pictures in `examples/`: `python demo/examples.py`. Their seed is used nowhere else."""

from __future__ import annotations

import random
from pathlib import Path

from vtx.tools.data.scenes import draw, random_scene

SEED = 2_026_112_100
COUNTS = (5, 4, 3, 6)


def main() -> None:
    folder = Path(__file__).resolve().parent.parent / "examples"
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(COUNTS, 1):
        rng = random.Random(SEED + number)
        scene = random_scene(rng, count)
        draw(scene, 336, rng).save(folder / f"scene-{number}.jpg", quality=92)
        print(f"scene-{number}.jpg:", ", ".join(f"{t.name} (cell {t.cell})" for t in scene.things))


if __name__ == "__main__":
    main()
