"""onnxruntime and OpenVINO on the same decoder layers, at each precision of the weights, in turn, in one process.

A bundle of two layers of random weights is exported at a precision and loaded by both; on OpenVINO in float32, in
bfloat16 and, of int8 and int4 weights, in int8 arithmetic. Each round gives every one of them the rows of a prompt and
then single rows. On a machine that is not quiet, take --threads 1 and the processor times, which waiting for a core
does not lengthen.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import export, parser, random_checkpoint, report, scratch
from numpy.typing import NDArray

from vtx.runtime.api.load import load
from vtx.runtime.backends.backend import StageCache
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.bench.series import shown, spread

PLACES = (("cpu", "f32"), ("openvino", "f32"), ("openvino", "bf16"))
OF_INTEGERS = ("openvino", "int8")
Times = NDArray[np.float64]


class Runner:
    """A cache of the first stage at one place, and what its runs took: [run, wall or processor] in milliseconds."""

    def __init__(self, bundle: Path, device: str, compute: str, threads: int) -> None:
        model = load(bundle, device=device, compute=compute, threads=threads, force=True)
        self.cache: StageCache = model.backend.stage(0, model.manifest.max_context)
        self.prefill: list[Times] = []
        self.token: list[Times] = []

    def round(self, rows: Any, tokens: int) -> None:
        self.cache.keep(0)
        self.prefill.append(self._timed(rows))
        self.token += [self._timed(rows[n : n + 1]) for n in range(tokens)]

    def _timed(self, rows: Any) -> Times:
        positions = np.arange(self.cache.length, self.cache.length + len(rows))
        start = _now()
        self.cache.append(TokenStates(rows), positions)
        return _now() - start


def _now() -> Times:
    return 1000 * np.array([time.perf_counter(), time.process_time()])


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--hidden", type=int, default=2048)
    args.add_argument("--heads", type=int, default=16)
    args.add_argument("--ffn", type=int, default=5504)
    args.add_argument("--rows", type=int, default=636, help="rows of the prompt")
    args.add_argument("--tokens", type=int, default=20, help="single rows after it")
    args.add_argument("--rounds", type=int, default=6, help="one more warms up")
    args.add_argument("--precision", choices=list(PRECISIONS), action="append", help="[default: each in turn]")
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--scratch", type=Path, help="folder for the weights, about 1 GB [default: here]")
    given = args.parse_args()
    sizes = {name: getattr(given, name) for name in ("hidden", "heads", "ffn")}
    rows = (0.3 * np.random.default_rng(0).standard_normal((given.rows, given.hidden))).astype(np.float32)
    table = [["weights", "device", "arithmetic", "prefill, ms", "processor ms", "a row, ms", "processor ms"]]
    figures: dict[str, Any] = {"sizes": sizes, "rows": given.rows, "threads": given.threads}
    with scratch(given.scratch) as folder:
        checkpoint = random_checkpoint(folder / "checkpoint", layers=2, **sizes, vocab=None)
        for precision in given.precision or PRECISIONS:
            bundle = export(checkpoint, folder / precision, (), precision)
            places = (*PLACES, OF_INTEGERS) if PRECISIONS[precision].bits else PLACES
            runners = {place: Runner(bundle, *place, given.threads) for place in places}
            for _ in range(given.rounds + 1):
                for runner in runners.values():
                    runner.round(rows, given.tokens)
            for place, runner in runners.items():
                prefill, token = (np.stack(t) for t in (runner.prefill[1:], runner.token[given.tokens :]))
                series = [spread(times[:, clock].tolist()) for times in (prefill, token) for clock in (0, 1)]
                table.append([precision, *place, *map(shown, series)])
                figures[" ".join((precision, *place))] = dict(zip(table[0][3:], series, strict=True))
    report(figures, table, given.json)


if __name__ == "__main__":
    main()
