"""What asking a gate costs beside the prefill it stands in: random weights of hidden 2048, in turn, in one process.

A few decoder layers are exported with a gate and given one image's rows and a question's; the prefill of a whole
model is taken as `--of` layers of that. Each round times both, in either order, and gives one ratio; so what else the
machine does falls on both sides. A bundle with N prebuilt K asks N gates at the most, so both ends are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import decoder_parser, random_checkpoint, report, scratch

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.graphs.gates import gate_tensors
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.backend import HiddenStates
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.bench.series import shown, spread

K = 2


def gated(checkpoint: Path, folder: Path, hidden: int, width: int, threads: int) -> Model:
    """The checkpoint as a bundle cut at K = 2, with a gate there."""
    rng, file = np.random.default_rng(0), folder / "gates.safetensors"
    shapes = ((width, 2 * hidden), (2, width))
    weights = [rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5) for shape in shapes]
    write_safetensors(file, dict(zip(gate_tensors(K), weights, strict=True)))
    plan = plan_export(ExportOptions(str(checkpoint), (K,), "fp32", gates=file))
    made = run_export(plan, folder / "bundle", force=False, report=lambda *_: None)
    return load(made.folder, device="cpu", threads=threads)


def prefill(model: Model, rows: HiddenStates) -> Callable[[], None]:
    """All layers over `rows`, from empty caches."""
    stages = [model.backend.stage(n, model.manifest.max_context) for n in range(len(model.manifest.stages))]
    positions = np.arange(len(rows), dtype=np.int64)

    def run() -> None:
        x = rows
        for stage in stages:
            stage.keep(0)
            x = stage.append(TokenStates(x), positions)

    return run


def timed(call: Callable[[], Any], times: int = 1) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return 1000 * (time.perf_counter() - start) / times


def main() -> None:
    args = decoder_parser(__doc__ or "")
    args.add_argument("--width", type=int, default=2048, help="of the gate")
    given = args.parse_args()
    sizes = {name: getattr(given, name) for name in ("layers", "hidden", "heads", "ffn")}
    with scratch(given.scratch) as folder:
        checkpoint = random_checkpoint(folder / "checkpoint", **sizes, vocab=None)
        model = gated(checkpoint, folder, given.hidden, given.width, given.threads)
        rows = np.random.default_rng(1).standard_normal((given.vision + given.text, given.hidden), np.float32)
        layers, question = prefill(model, rows), rows[-given.text :]
        pairs = []
        for number in range(given.rounds + 1):
            found = np.zeros(2)
            for order in ((0, 1), (1, 0)):
                for which in order:
                    call = (layers, lambda: model.backend.gate(K, question))[which]
                    found[which] += timed(call, times=(1, 5)[which]) / 2
            if number:  # the first round warms up
                pairs.append(found)
    times = np.stack(pairs) * [given.of / given.layers, 1]
    whole, gate = (spread(times[:, which].tolist()) for which in (0, 1))
    share = 100 * times[:, 1] / times[:, 0]
    one, most = spread(share.tolist()), spread((share * (given.of - 1)).tolist())
    table = [
        ["", "ms", "% of the prefill"],
        [f"prefill, {given.of} layers, {given.vision} + {given.text} rows", shown(whole), ""],
        ["one gate", shown(gate), shown(one, 3)],
        [f"all {given.of - 1} gates that the model could have", "", shown(most, 3)],
    ]
    figures = {"prefill_ms": whole, "gate_ms": gate, "one_gate_percent": one, "all_gates_percent": most}
    report({"sizes": sizes, "of": given.of, "threads": given.threads, **figures}, table, given.json)


if __name__ == "__main__":
    main()
