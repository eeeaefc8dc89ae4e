"""What does measuring every K cost by a bundle's own engine, beside the plain reference in float32, and is it the same?

    vtx-export --precision fp16 --k 3,4,5,8 --out build/demo-fp16
    python benchmarks/calibration.py demo build/demo-fp16 --questions 200
    python benchmarks/make_checkpoint.py llava-1.5-7b-2 build/cut
    vtx-export --model build/cut --precision int4 --k 2 --out build/cut-int4
    python benchmarks/calibration.py build/cut build/cut-int4 --questions 4 --of 32 --engines cpu openvino:f32

Both measure the same questions about drawn scenes at the K of the bundles, in turns of --batch; the reference's answers
come from its temporary export, as in vtx-calibrate. With --of LAYERS, a figure for a model of that many layers, which
is an estimate: encoding and the output matrix as measured, all else multiplied.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import parser, report

from vtx.exporter.calibration.calibrate import BatchMeasurer, CalibrationOptions
from vtx.exporter.calibration.source import answering, open_source
from vtx.exporter.reference.engine import EngineReference
from vtx.exporter.reference.prompts import prepare
from vtx.runtime.bundle.bundle import Bundle
from vtx.tools.calibration.report import ItemResult
from vtx.tools.common.loading import Loading
from vtx.tools.data.items import Data, scene_items


class Timed:
    """One side of the comparison, with processor and wall-clock seconds of all it did, and of what no layer does."""

    def __init__(self, measurer: BatchMeasurer, size: int) -> None:
        self.measurer, self.size, self.results = measurer, size, list[ItemResult]()
        self.seconds = {"no layer": np.zeros(2), "all": np.zeros(2)}
        for each in {id(r): r for r in (measurer.reference, measurer.answerer) if r is not None}.values():
            head: Any = each.backend if isinstance(each, EngineReference) else each
            each.encode = self._timed("no layer", each.encode)  # type: ignore[method-assign]
            head.head = self._timed("no layer", head.head)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = np.array([time.process_time(), time.perf_counter()])
            try:
                return call(*args)
            finally:
                self.seconds[name] += np.array([time.process_time(), time.perf_counter()]) - start

        return timed

    def run(self, items: list[Any]) -> None:
        batch = self._timed("all", self.measurer.batch)
        for at in range(0, len(items), self.size):
            self.results += batch(items[at : at + self.size], lambda _: None)

    def of(self, share: float) -> np.ndarray[Any, Any]:
        """Seconds per question, [processor, wall clock], with the layers multiplied."""
        once = self.seconds["no layer"]
        found: np.ndarray[Any, Any] = (once + share * (self.seconds["all"] - once)) / len(self.results)
        return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", help="a checkpoint, or demo")
    options.add_argument("bundles", type=Path, nargs="+", help="exported from it")
    options.add_argument("--questions", type=int, default=200)
    options.add_argument("--max-new-tokens", type=int, default=16)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--of", type=int, help="layers of the whole model")
    options.add_argument("--engines", nargs="+", default=["cpu"], metavar="DEVICE[:COMPUTE]", help="of the bundles")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    chosen = CalibrationOptions(max_new_tokens=args.max_new_tokens)
    ks = Bundle.open(args.bundles[0]).manifest.variants
    with ExitStack() as stack:
        full = open_source(args.model)
        model = stack.enter_context(answering(full, Path(stack.enter_context(TemporaryDirectory())) / "b", print_none))
        sides = {"reference, float32": Timed(
            BatchMeasurer(full, full.reference(), EngineReference(model), ks, chosen), args.batch
        )}  # fmt: skip
        for path, name in itertools.product(args.bundles, args.engines):
            device, _, compute = name.partition(":")
            source = open_source("", path, engine=Loading(device, compute or None, args.threads))
            reference = source.reference()
            measurer = BatchMeasurer(source, reference, reference, ks, chosen)
            sides[f"{path.name}: {source.calibrated.engine}"] = Timed(measurer, 1)
        items, skipped = prepare(full, Data("scenes", tuple(scene_items(args.questions))), args.max_new_tokens)
        assert not skipped, skipped
        for at in range(0, len(items), args.batch):
            for side in sides.values():
                side.run(items[at : at + args.batch])
    first, share = next(iter(sides.values())), (args.of or full.config.text.layers) / full.config.text.layers
    heads = [
        "",
        "s of processor a question",
        "s",
        "speed-up",
        *(f"KL, K = {k}" for k in ks),
        "answers as measured",
    ]
    rows, figures = [heads], dict[str, Any]()
    for name, side in sides.items():
        processor, wall = side.of(share)
        kl = np.mean([result.kl for result in side.results], axis=0)
        same = np.mean([a.answer == b.answer for a, b in zip(side.results, first.results, strict=True)])
        agree = np.mean([a.agree == b.agree for a, b in zip(side.results, first.results, strict=True)])
        rows.append([name, f"{processor:.3g}", f"{wall:.3g}", f"{first.of(share)[0] / processor:.1f}",
                     *(f"{value:.3g}" for value in kl), f"{same:.1%}"])  # fmt: skip
        figures[name] = {"processor_s": processor, "wall_s": wall, "cut": side.of(1).tolist(), "kl": kl.tolist(),
                         "same_answer": same, "same_verdict_at_every_k": agree}  # fmt: skip
    report(
        {"layers": full.config.text.layers, "of": args.of, "questions": len(items), "sides": figures}, rows, args.json
    )


def print_none(*_: object) -> None:
    """No progress."""


if __name__ == "__main__":
    main()
