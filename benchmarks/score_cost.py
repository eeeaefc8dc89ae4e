"""What asking for attention costs beside the prefill it stands in: random weights of hidden 2048, in turn, one process.

A few decoder layers are exported with one cut that is asked. Each round fills their caches with one image's rows and a
question's, then runs the question again through the asked layer, without scores and with them: queries handed out, and
the score graph over all filled slots. The prefill of a whole model is taken as `--of` layers of that, `--cuts` of them
asked. A round times each side in either order, so what else the machine does falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import decoder_parser, random_checkpoint, report, scratch

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.backend import StageCache
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates
from vtx.tools.bench.series import shown, spread

LAYER = 1  # after which rows are scored


def scored(checkpoint: Path, folder: Path, threads: int) -> Model:
    """The checkpoint as a bundle that is cut, and asked, after its first layer."""
    options = ExportOptions(str(checkpoint), (), "fp32", reductions=(f"fastv:k={LAYER}",), dialects=("ort",))
    made = run_export(plan_export(options), folder / "bundle", force=False, report=lambda *_: None)
    return load(made.folder, device="cpu", threads=threads)


def prefill(stages: list[StageCache], front: HiddenStates, tail: HiddenStates) -> Callable[[], None]:
    """All layers over the front's rows and then the tail's, from empty caches."""
    before, after = places(front, tail)

    def run() -> None:
        x, y = front, tail
        for stage in stages:
            stage.keep(0)
            x, y = stage.append(TokenStates(x), before), stage.append(TokenStates(y), after)

    return run


def question(stage: StageCache, front: HiddenStates, tail: HiddenStates, *, score: bool) -> Callable[[], None]:
    """The first stage over the tail's rows, with or without asking what they look at; the front's are there."""
    _, after = places(front, tail)

    def run() -> None:
        stage.keep(len(front))
        stage.append(TokenStates(tail), after, query=score)
        if score:
            stage.attention()

    return run


def places(front: HiddenStates, tail: HiddenStates) -> tuple[Ids, Ids]:
    both = np.arange(len(front) + len(tail), dtype=np.int64)
    return both[: len(front)], both[len(front) :]


def timed(call: Callable[[], None]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    args = decoder_parser(__doc__ or "")
    args.add_argument("--cuts", type=int, default=4, help="layers of it that are asked")
    given = args.parse_args()
    sizes = {name: getattr(given, name) for name in ("layers", "hidden", "heads", "ffn")}
    with scratch(given.scratch) as folder:
        checkpoint = random_checkpoint(folder / "checkpoint", **sizes, vocab=None)
        model = scored(checkpoint, folder, given.threads)
        specs = model.manifest.stages
        stages = [model.backend.stage(number, model.manifest.max_context) for number in range(len(specs))]
        rows = np.random.default_rng(1).standard_normal((given.vision + given.text, given.hidden), np.float32)
        front, tail = rows[: given.vision], rows[given.vision :]
        calls = (
            prefill(stages, front, tail),
            question(stages[0], front, tail, score=False),
            question(stages[0], front, tail, score=True),
            stages[0].attention,
        )
        found = []
        for number in range(given.rounds + 1):
            times = np.zeros(4)
            for order in ((0, 1, 2, 3, 1, 2, 3), (0, 2, 3, 1, 2, 3, 1)):
                for which in order:
                    times[which] += timed(calls[which]) / (4 if which else 2)
            if number:  # the first round warms up
                found.append(times)
    whole, without, asked, graph = np.stack(found).T
    whole = whole * given.of / given.layers
    cost = asked - without
    share, own = (spread((100 * given.cuts * series / whole).tolist()) for series in (cost, graph))
    table = [
        ["", "ms", f"% of the prefill with {given.cuts} cuts"],
        [f"prefill, {given.of} layers, {given.vision} + {given.text} rows", shown(spread(whole.tolist())), ""],
        ["one scoring: a question's rows with it, less without", shown(spread(cost.tolist())), shown(share, 3)],
        ["its score graph by itself", shown(spread(graph.tolist())), shown(own, 3)],
    ]
    figures = {
        "prefill_ms": spread(whole.tolist()),
        "scoring_ms": spread(cost.tolist()),
        "percent": share,
        "graph_percent": own,
    }
    report({"sizes": sizes, "of": given.of, "cuts": given.cuts, "threads": given.threads, **figures}, table, given.json)


if __name__ == "__main__":
    main()
