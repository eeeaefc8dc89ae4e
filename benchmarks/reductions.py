"""What the methods that leave out image tokens take: choosing alone, and answers of a 1B shape; rows for the pages.

    python benchmarks/reductions.py --out build/reductions            # both, on a quiet machine
    python benchmarks/reductions.py --out build/reductions --write    # and the tables of docs/measurements

`selection.py` at 576 and 2,928 tokens in both runtimes, then the answers of each method on random weights in int8 on
OpenVINO: the first token, the second question and the KV cache. What is there already is not measured again. --write
replaces the rows of both tables. `make cpp` before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import parser

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.tools.bench.methods import Method, find_methods
from vtx.tools.bench.stopwatch import timed
from vtx.tools.bench.work import WorkCounter
from vtx.tools.data.items import SCENES, read_data

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/measurements"
MODEL = ROOT / "build/llava-1b"
BUNDLE = ROOT / "build/llava-1b-methods"
SPECS = (
    "none", "cls:keep=0.5", "cdpruner:keep=0.5,text=none", "divprune:keep=0.5", "random:keep=0.5",
    "visionzip:dominant=244,contextual=44", "hiprune:keep=0.5", "cdpruner:keep=0.5", "dart:keep=0.5,k=0",
    "dart:keep=243", "fastv:k=2,ratio=0.571", "pyramiddrop:layers=4/8/12",
)  # fmt: skip
QUESTIONS = 6
SECOND = "What else is in the picture?"


def run(*command: object) -> None:
    print("$", *command, flush=True)
    subprocess.run([*map(str, command)], check=True, cwd=ROOT)


def measured(path: Path, *command: object) -> dict[str, Any]:
    """What `command` writes to `path`, measured now unless it is there."""
    if not path.exists():
        run(*command, path)
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def answers_of(path: Path) -> dict[str, Any]:
    """Each method at about equal cost and with K = 9 behind it, on the shape of 1B."""
    vtx = Path(sys.executable).parent
    if not path.exists() and not BUNDLE.exists():
        if not MODEL.exists():
            run(sys.executable, "benchmarks/make_checkpoint.py", "1b", MODEL)
        specs = [word for spec in SPECS for word in ("--reduce", spec)]
        run(
            vtx / "vtx-export",
            "--model",
            MODEL,
            "--k",
            "9",
            "--precision",
            "int8",
            *specs,
            "--arithmetic",
            "f32",
            "--out",
            BUNDLE,
        )
    if not path.exists():
        path.write_text(json.dumps({"methods": asked()}), encoding="utf-8")
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def asked() -> list[dict[str, Any]]:
    """Each method's answers to six questions in turn, and to a second question about the same image."""
    with load(BUNDLE, device="openvino", compute="bf16", threads=2) as model:
        manifest = model.manifest
        methods = find_methods(manifest, (None, *manifest.variants))
        backend, calls = timed(model.backend)
        watched = Model(model.bundle, backend, model.loaded.load_ms)
        counter = WorkCounter(model.bundle, backend.compute, backend.kv_slot_bytes)
        rows = dict[Method, list[dict[str, float]]]((method, []) for method in methods)
        for item in read_data(SCENES, None, QUESTIONS).items:
            images = watched.loaded.images.prepare_all(item.images)
            for method in methods:
                calls.clear()
                with Conversation(watched.loaded, images) as conversation:
                    settings = {"reduce": method.reduce, "max_new_tokens": 8}
                    first = conversation.ask(item.question, method.k, **settings).stats
                    flops = counter.first_token(first, calls)
                    second = conversation.ask(SECOND, method.k, **settings).stats
                rows[method].append(
                    {
                        "first_token": first.timings_ms["first_token"],
                        "kv_bytes": first.kv_bytes,
                        "flops": flops,
                        "second_question": second.timings_ms["first_token"],
                        "reused_layers": second.reused_layers,
                    }
                )
    unreduced = fmean(row["flops"] for row in rows[methods[0]])
    return [
        {
            "name": method.name,
            "reduce": method.reduce,
            "flops_ratio": fmean(row["flops"] for row in answers) / unreduced,
            "kv_bytes": fmean(row["kv_bytes"] for row in answers),
            "reused_layers": fmean(row["reused_layers"] for row in answers),
            "ms": {key: {"median": median(row[key] for row in answers)} for key in ("first_token", "second_question")},
        }
        for method, answers in rows.items()
    ]


def cell(series: dict[str, Any]) -> list[str]:
    low, high = (series["q1"], series["q3"]) if series["n"] >= 4 else (series["min"], series["max"])
    return [f"{value:.2f}" for value in (series["median"], low, high)]


def replace_rows(page: str, table: str, rows: list[list[Any]]) -> None:
    """Put `rows` in the place of a table's in `results/PAGE.jsonl`."""
    path = PAGES / f"results/{page}.jsonl"
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["table"] != table or "columns" in entry:
            kept.append(line)
        if entry["table"] == table and "columns" in entry:
            kept += [json.dumps({"table": table, "row": row}, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--out", type=Path, default=ROOT / "build/reductions", help="directory of the figures")
    args.add_argument("--write", action="store_true", help="write the tables of docs/measurements, too")
    given = args.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    selection = measured(
        out / "selection.json", sys.executable, "benchmarks/selection.py", "--tokens", "576,2928", "--json"
    )
    methods = answers_of(out / "methods-1b.json")
    if not given.write:
        return
    chosen = [
        [f"{row['tokens']:,}", f"`{row['spec']}`", row["runtime"], cell(row["first_ms"]), cell(row["later_ms"])]
        for row in selection["selection"]
    ]
    replace_rows("questions", "choosing-image-tokens-before-t-7", chosen)
    timed = []
    for row in methods["methods"]:
        first, second = (f"{row['ms'][name]['median']:.0f}" for name in ("first_token", "second_question"))
        spec, with_k, depth = row["name"].partition(" + ")
        name = row["name"] if row["reduce"] == "none" else f"`{spec}`{with_k}{depth}"
        timed.append(
            [
                name,
                f"{row['flops_ratio']:.0%}",
                first,
                second,
                f"{row['reused_layers']:.0f}",
                f"{row['kv_bytes'] / 1e6:.1f} MB",
            ]
        )
    replace_rows("methods", "time-at-equal-cost-and-the-sec-5", timed)
    run(sys.executable, PAGES / "tables.py")


if __name__ == "__main__":
    main()
