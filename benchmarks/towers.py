"""Processor time of a picture in the vision tower: one a pass, and several in one pass.

    python -m benchmarks.towers BUNDLE [--device cpu] [--compute int8]

Rounds of the numbers of pictures take turns; seconds are the process's, all threads, for each picture. OpenVINO has a
tower of its own for each number here; vtx compiles it for one picture.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from benchmarks.common import bundle_parser, report

import vtx
from vtx.runtime.bundle.spec import names

NUMBERS = (1, 2, 4, 8)


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--compute")
    args.add_argument("--rounds", type=int, default=5)
    given = args.parse_args()
    found: dict[int, list[float]] = {number: [] for number in NUMBERS}
    with vtx.load(given.bundle, device=given.device, compute=given.compute, threads=given.threads) as model:
        image, rng = model.manifest.image, np.random.default_rng(given.seed)
        pixels = rng.standard_normal((max(NUMBERS), 3, *image.sides), np.float32)
        towers = dict[int, Any]()
        for number in NUMBERS:
            if model.backend.device == "openvino":
                load_tower(model, (number, 3, *image.sides))
            model.backend.vision(pixels[:number])
            towers[number] = model.backend._towers
        for round_number in range(given.rounds + 1):
            for number in NUMBERS:
                model.backend._towers = towers[number]
                started = time.process_time()
                for first in range(0, max(NUMBERS), number):
                    model.backend.vision(pixels[first : first + number])
                if round_number:  # the first one prepares each size
                    found[number].append((time.process_time() - started) / max(NUMBERS))
        device, compute = model.backend.device, model.backend.compute
    rows: list[dict[str, Any]] = [
        {
            "pictures": number, "device": device, "compute": compute, "cpu_s_a_picture": round(median(values), 5),
            "of_one_a_pass": round(median(v / o for v, o in zip(values, found[1], strict=True)), 3),
        }
        for number, values in found.items()
    ]  # fmt: skip
    table = [["pictures a pass", "device", "processor time a picture, ms", "of one a pass"]]
    for row in rows:
        milliseconds = f"{1000 * row['cpu_s_a_picture']:.2f}"
        table.append([str(row["pictures"]), f"{device}, {compute}", milliseconds, f"{row['of_one_a_pass']:.2f}"])
    report({"rows": rows}, table, given.json)


def load_tower(model: vtx.Model, shape: tuple[int, ...]) -> None:
    """Have OpenVINO compile the tower for pixels of this shape."""
    import openvino

    reshape = openvino.Model.reshape
    with patch.object(openvino.Model, "reshape", lambda self, _: reshape(self, {names.PIXELS: [*shape]})):
        model.backend._towers = {}
        model.backend.vision(np.zeros(shape, np.float32))


if __name__ == "__main__":
    main()
