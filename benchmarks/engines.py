"""Engines of TensorRT-RTX for cards that are not here: file sizes, and the peak memory of each build.

Checkpoints of random weights are written in the shapes below, exported at each precision and built for each card, one
graph at a time. Each engine is a line of `--lines FILE`, which a later run does not build again, so the script can be
stopped and started at will; engines that are predicted to need more memory than `--memory` are left out and said.
Needs vtx-edge[rtx] and vtx-edge[export], no GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common import parser
from make_checkpoint import Shape, write_config, write_tokenizer, write_weights

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.units import parse_size, size
from vtx.tools.tensorrt.build import EngineJob, EnginePlan, build_engines, plan_engines
from vtx.tools.tensorrt.targets import TARGETS, load_tensorrt

CARDS = ("sm89", "sm120")
SMALL_TOWER = (2, 64, 128, 2)  # CLIP's own is in the first shape


class Model(NamedTuple):
    """A shape in words, and the precisions in which its engines are built."""

    title: str
    shape: Shape
    ks: tuple[int, ...]
    precisions: tuple[str, ...]


MODELS = {
    "1b": Model("1B, heads of 128", Shape(16, 2048, 5504, 16), (9,), ("fp16", "bf16", "int8", "int4")),
    "7b-2": Model(
        "7B, 2 layers, heads of 128", Shape(2, 4096, 11008, 32, tower=SMALL_TOWER), (),
        ("fp16", "bf16", "int8", "int4"),
    ),
    "1b-64": Model(
        "1B, heads of 64, 8 for K and V",
        Shape(16, 2048, 5504, 32, kv_heads=8, tower=SMALL_TOWER), (9,),
        ("fp16", "bf16", "int8", "int4"),
    ),
    "7b-8": Model(
        "7B, 8 layers, heads of 128", Shape(8, 4096, 11008, 32, tower=SMALL_TOWER), (), ("int8", "int4"),
    ),
}  # fmt: skip
HEAD = {
    "table": "engines",
    "columns": ["model", "weights", "card", "graph", "weights of it", "engine", "peak memory, predicted", "measured"],
    "align": ["---", "---", "---", "---", "---:", "---:", "---:", "---:"],
    "caption": "TensorRT-RTX {version}, built without a GPU; GB are 10^9 bytes",
}  # fmt: skip


def exported(work: Path, name: str, precision: str) -> Bundle:
    """The bundle of a shape at a precision, made once."""
    model = MODELS[name]
    checkpoint = work / name
    out = work / f"{name}-{precision}"
    if not (out / "vtx.json").exists():
        if not (checkpoint / "model.safetensors.index.json").exists():
            shutil.rmtree(checkpoint, ignore_errors=True)
            checkpoint.mkdir(parents=True)
            write_config(checkpoint, model.shape)
            write_tokenizer(checkpoint, model.shape)
            write_weights(checkpoint, model.shape)
        options = ExportOptions(str(checkpoint), model.ks, precision, 4096, dialects=("ort", "trt"))
        run_export(plan_export(options), out, force=False, report=lambda *_: None)
    return Bundle.open(out)


def title(plan: EnginePlan, job: EngineJob) -> str:
    m = plan.bundle.manifest
    files = m.dialects["trt"]
    for stage, file in zip(m.stages, files.stages, strict=True):
        if job.graph.name == file:
            return f"layers {stage.first} to {stage.last}"
    return {files.embed: "embedding", files.head: "head", files.vision: "vision"}[job.graph.name]


def built(plan: EnginePlan, model: str, wanted: set[str], most: int) -> Iterator[list[str]]:
    """The row of each graph that is wanted and fits into the memory."""
    for job in plan.jobs:
        graph = title(plan, job)
        if graph not in wanted:
            continue
        first = [model, plan.bundle.manifest.precision, plan.target.name, graph, size(job.graph.weights)]
        if job.memory > most:
            print(*first, f"left out: it is predicted to need {size(job.memory)}", sep=", ", flush=True)
            continue
        (outcome,) = build_engines(replace(plan, jobs=(job,)), lambda *_: None)
        (plan.folder / outcome.record.file).unlink()
        assert outcome.built is not None, "an engine that was there already"
        yield [*first, size(outcome.record.bytes), size(job.memory), size(outcome.built.memory)]


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--model", choices=list(MODELS), action="append", help="[default: each in turn]")
    args.add_argument("--precision", action="append", help="[default: each of the model's]")
    args.add_argument("--card", choices=CARDS, action="append", help="[default: each in turn]")
    args.add_argument("--memory", default="10GB", help="the most that a build may need [default: 10GB]")
    args.add_argument("--work", type=Path, default=Path("build/engines"), help="checkpoints and bundles, about 20 GB")
    args.add_argument("--lines", type=Path, default=Path("docs/measurements/results/engines.jsonl"))
    given = args.parse_args()
    lines = given.lines.read_text(encoding="utf-8").splitlines() if given.lines.exists() else []
    known = {tuple(json.loads(line)["row"][:4]) for line in lines[1:]}
    for name in given.model or MODELS:
        model = MODELS[name]
        graphs = {"embedding", "head", *(["vision"] if model.shape.tower != SMALL_TOWER else [])}
        for precision in given.precision or model.precisions:
            bundle = exported(given.work, name, precision)
            stages = {f"layers {stage.first} to {stage.last}" for stage in bundle.manifest.stages}
            for card in given.card or CARDS:
                wanted = {graph for graph in graphs | stages if (model.title, precision, card, graph) not in known}
                module, release = load_tensorrt(TARGETS[card])
                plan = plan_engines(bundle, TARGETS[card], release, module.__version__, "trt")
                if not lines:
                    caption = str(HEAD["caption"]).format(version=module.__version__)
                    lines = [json.dumps({**HEAD, "caption": caption})]
                    given.lines.write_text(f"{lines[0]}\n", encoding="utf-8")
                for row in built(plan, model.title, wanted, parse_size(given.memory, "--memory")):
                    with given.lines.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"table": "engines", "row": row}) + "\n")
                    print(*row, sep=", ", flush=True)


if __name__ == "__main__":
    main()
