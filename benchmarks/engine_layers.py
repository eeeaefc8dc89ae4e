"""The layers of TensorRT-RTX's engines of stages: fused attention, dequantised weights, launches and bytes.

    python -m benchmarks.engine_layers

Stages of two and of three layers with the heads of published models are built for cards that are not here, in both
dialects, and counted in the builder's own list of layers; what a layer adds is the difference. Kernels are a large part
of engines of this width, and as large in wider ones, so the bytes beside weights have a column, and int4 is built in
twice the width too. Each row is a line of
`--lines FILE`, which a later run does not build again. Needs vtx-edge[rtx] and vtx-edge[export], no GPU.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import tensorrt_rtx
from benchmarks.common import parser
from tests.support.engine_layers import CARDS, DIALECTS, PRECISIONS, SHAPES, WIDER, StageEngine, build_stage, bundles_of

LAYERS = (2, 3)
CONFIGURATIONS = (*product(SHAPES, PRECISIONS, DIALECTS, CARDS), *product(WIDER, ("int4",), DIALECTS, ("sm89",)))
TABLE = "layers"
SUMMARY = "launches"
COLUMNS = ["card", "dialect", "heads", "weights", "fused attention", "casts beside products", "launches of a layer",
           "weights in the engine", "engine", "beside weights, a layer"]  # fmt: skip
CAPTION = (
    f"TensorRT-RTX {tensorrt_rtx.__version__}, built without a GPU, hidden 1024 unless named; "
    "of a token's and a prompt's profile"
)


def row(card: str, dialect: str, shape: str, precision: str, few: StageEngine, more: StageEngine) -> list[str]:
    """The cells of one configuration, of the engines of fewer and of more layers."""
    launches = [len(b) - len(a) for a, b in zip(few.launches, more.launches, strict=True)]
    beside = (more.size - more.weights) - (few.size - few.weights)
    return [
        card,
        dialect,
        shape,
        precision,
        "/".join(str(b - a) for a, b in zip(few.attention, more.attention, strict=True)),
        "/".join(map(str, more.casts)),
        "/".join(map(str, launches)),
        f"{more.copies:.3f}",
        f"{more.size / more.job.graph.weights:.2f}",
        f"{beside / 1e6:.2f} MB",
    ]


def summary(rows: list[list[str]]) -> list[list[str]]:
    """By heads, the launches of each dialect and precision; one figure where all cards have it."""
    launches = defaultdict[tuple[str, ...], list[str]](list)
    for cells in rows:
        launches[tuple(cells[1:4])].append(cells[COLUMNS.index("launches of a layer")])
    return [
        [shape, *(", ".join(dict.fromkeys(launches[d, shape, p])) for d, p in product(DIALECTS, PRECISIONS))]
        for shape in SHAPES
    ]


def lines(rows: list[list[str]]) -> list[dict[str, object]]:
    """The lines of both tables."""
    columns = ["heads", *(f"`{d}` {p}" if p == PRECISIONS[0] else p for d, p in product(DIALECTS, PRECISIONS))]
    heads = {"caption": CAPTION, "align": ["---"] * len(COLUMNS)}
    return [
        {"table": TABLE, "columns": COLUMNS, **heads},
        *({"table": TABLE, "row": cells} for cells in rows),
        {"table": SUMMARY, "columns": columns, "align": ["---"] * len(columns)},
        *({"table": SUMMARY, "row": cells} for cells in summary(rows)),
    ]


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--lines", type=Path, default=Path("docs/measurements/results/engine-layers.jsonl"))
    given = args.parse_args()
    text = given.lines.read_text(encoding="utf-8") if given.lines.exists() else ""
    found = [json.loads(line) for line in text.splitlines()]
    others = [line for line in found if line["table"] not in (TABLE, SUMMARY)]
    rows = {tuple(line["row"][:4]): line["row"] for line in found if line["table"] == TABLE and "row" in line}
    print(*COLUMNS, sep=" | ")
    with TemporaryDirectory() as folder:
        bundles = bundles_of(Path(folder))
        for shape, precision, dialect, card in CONFIGURATIONS:
            key = (card, dialect, shape, precision)
            if key not in rows:
                few, more = (
                    build_stage(bundles(shape, precision, layers), card, dialect, Path(folder)) for layers in LAYERS
                )
                rows[key] = row(*key, few, more)
                written = [*lines(list(rows.values())), *others]
                given.lines.write_text("".join(f"{json.dumps(line)}\n" for line in written), encoding="utf-8")
            print(*rows[key], sep=" | ", flush=True)


if __name__ == "__main__":
    main()
