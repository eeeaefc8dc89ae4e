"""Processor time of a picture in the vision tower: one a pass, and several in one pass.

    python -m benchmarks.towers BUNDLE [--device cpu] [--compute int8]

Rounds of the numbers of pictures take turns; seconds are the process's, all threads, for each picture. Each
number has a model of its own, since OpenVINO compiles a tower for one size: a bundle of 1 GB takes 7 GB of memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as held:
        models = {number: held.enter_context(loaded(given, number)) for number in NUMBERS}
        rng = np.random.default_rng(given.seed)
        pixels = rng.standard_normal((max(NUMBERS), 3, *models[1].manifest.image.sides), np.float32)
        for _ in range(given.rounds):
            for number, model in models.items():
                started = time.process_time()
                for first in range(0, max(NUMBERS), number):
                    model.backend.vision(pixels[first : first + number])
                found[number].append((time.process_time() - started) / max(NUMBERS))
        device = models[1].backend.device
        compute = models[1].backend.compute
        about = {"model": given.bundle.name, "precision": models[1].manifest.vision_precision}
    rows: list[dict[str, Any]] = [
        {
            **about,
            "pictures": number,
            "device": device,
            "compute": compute,
            "cpu_s_a_picture": round(median(values), 5),
            "of_one_a_pass": round(median(v / o for v, o in zip(values, found[1], strict=True)), 3),
        }
        for number, values in found.items()
    ]
    table = [["pictures per pass", "device", "CPU ms per picture", "vs. one per pass"]]
    for row in rows:
        milliseconds = f"{1000 * row['cpu_s_a_picture']:.2f}"
        table.append([str(row["pictures"]), f"{device}, {compute}", milliseconds, f"{row['of_one_a_pass']:.2f}"])
    report({"rows": rows}, table, given.json)


@contextmanager
def loaded(given: Any, number: int) -> Iterator[vtx.Model]:
    """The model, its tower prepared for this number of pictures a pass."""
    with (
        ExitStack() as patched,
        vtx.load(given.bundle, device=given.device, compute=given.compute, threads=given.threads) as model,
    ):
        shape = (number, 3, *model.manifest.image.sides)
        if model.backend.device == "openvino":
            import openvino

            reshape = openvino.Model.reshape
            patched.enter_context(
                patch.object(openvino.Model, "reshape", lambda self, _: reshape(self, {names.PIXELS: [*shape]}))
            )
        model.backend.vision(np.zeros(shape, np.float32))
        patched.close()
        yield model


if __name__ == "__main__":
    main()
