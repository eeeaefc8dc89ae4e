"""The newest families at their published sizes with random weights: export, and answers beside other engines.

    python -m benchmarks.shapes make qwen3-vl-2b         # a checkpoint: 3 to 10 GB of disk, 1 to 3 minutes
    python -m benchmarks.shapes rivals qwen3-vl-2b       # converted for other engines; records why one cannot be
    python -m benchmarks.shapes export qwen3-vl-2b       # int4, with one K, in a child process; deletes the checkpoint
    python -m benchmarks.shapes measure                  # on a quiet machine: every bundle that is there
    python -m benchmarks.shapes report --write           # the tables of docs/measurements

Without names a step takes every shape in turn. Each step records what it found as a line of RESULTS in --work and is
not repeated there: an interrupted run goes on where it stopped. Answers are measured in turn by a process for each
engine and K, as `benchmarks.peers` does: first token, second question, a token, peak memory. Shapes and their sources
are in `shape_files.py` and `page_shapes.py`; those of the latter are measured beside transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from benchmarks.page_shapes import PAGE_SHAPES
from benchmarks.peers.contenders import READY, ROOT, US, Contender, PeerError, Places, call, install, prepare, run
from benchmarks.peers.contract import Result, Work
from benchmarks.shape_files import SHAPES, Shape, write_checkpoint

from vtx.runtime.strict import json_value
from vtx.tools.bench.machine import describe

RESULTS = "results.jsonl"
INDEX = "model.safetensors.index.json"
GENAI = Contender("openvino", "int4@auto")
TORCH = Contender("transformers_auto", "bf16")
# The release of transformers that optimum-intel 2.2.0 converts a family with, where it is not the one that it installs.
CONVERTED_WITH = {"qwen3_vl": "5.0.0", "qwen3_5": "5.2.0"}
NOT_RUN = {
    "llama.cpp": "llama-cpp-python 0.3.36 knows the four families, but its package has no converter from checkpoints, "
    "and gguf_files.py writes LLaVA only",
}
ENGINES = {"openvino": "OpenVINO", "cpu": "onnxruntime"}
QUESTION = 96  # tokens of a prompt beside the image
TABLES = ROOT / "docs/measurements/results/shapes.jsonl"
MEASURED = re.compile(r"^measured: .* of disk, (?P<memory>[\d.]+ \w+) \(predicted (?P<predicted>[\d.]+ \w+)", re.M)


class Records:
    """The lines of RESULTS, read and appended to."""

    def __init__(self, work: Path) -> None:
        self.path = work / RESULTS
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def add(self, step: str, name: str, **found: Any) -> None:
        line = {"step": step, "shape": name, **found, "commit": commit(), "machine": json_value(describe())}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def of(self, step: str, name: str, **wanted: Any) -> list[dict[str, Any]]:
        wanted |= {"step": step, "shape": name}
        return [line for line in self.lines if wanted.items() <= line.items()]


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def checkpoint(work: Path, name: str) -> Path:
    return work / name / "checkpoint"


def places(args: argparse.Namespace, name: str) -> Places:
    return Places(args.venvs or args.work / "rivals", args.work / name, args.torch)


def contenders(name: str, shapes: dict[str, Shape]) -> list[Contender]:
    """vtx on each engine at none and K, its arithmetic its own choice, and its rival."""
    own = [Contender(US, f"int4@{engine}+auto") for engine in ENGINES]
    rival = rival_of(shapes[name])
    return [c for whole in own for c in (whole, Contender(US, f"{whole.precision}/{shapes[name].k}"))] + [rival]


def rival_of(shape: Shape) -> Contender:
    return TORCH if shape.torch else GENAI


# ---- steps -----------------------------------------------------------------------------------------------------------


def make(name: str, shape: Shape, args: argparse.Namespace, records: Records) -> None:
    folder = checkpoint(args.work, name)
    if (folder / INDEX).exists():
        return
    begun = time.monotonic()
    write_checkpoint(folder, shape)
    size = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"]
    records.add("make", name, parameters=size // 2, seconds=time.monotonic() - begun, assumed=shape.assumed)


def rivals(name: str, shape: Shape, args: argparse.Namespace, records: Records) -> None:
    """Convert the checkpoint for OpenVINO GenAI, not for transformers; who cannot take part, and why."""
    if records.of("rival", name):
        return
    if shape.torch:
        prepare(TORCH, checkpoint(args.work, name), places(args, name))
        records.add("rival", name, contender=TORCH.name, failed="")
    else:
        said(f"{name}: preparing {GENAI.name}")
        where = places(args, name)
        failed = ""
        before = os.environ.get("PYTHONPATH")
        try:
            install(GENAI, where)
            if release := CONVERTED_WITH.get(shape.config["model_type"]):
                folder = (where.venvs / f"transformers-{release}").resolve()
                if not folder.exists():
                    call(
                        [
                            str(where.python(GENAI)),
                            "-m",
                            "pip",
                            "install",
                            "--no-deps",
                            "--target",
                            str(folder),
                            f"transformers=={release}",
                        ]
                    )
                os.environ["PYTHONPATH"] = str(folder)  # of the converting process alone
            prepare(GENAI, checkpoint(args.work, name), where)
        except PeerError as error:
            failed = str(error)
        finally:
            os.environ.pop("PYTHONPATH", None)
            if before is not None:
                os.environ["PYTHONPATH"] = before
        records.add("rival", name, contender=GENAI.name, failed=failed)
        for rival, reason in NOT_RUN.items():
            records.add("rival", name, contender=rival, failed=reason)


def export(name: str, shape: Shape, args: argparse.Namespace, records: Records) -> None:
    """The bundle in int4 with K, the questions to be asked of it, and what vtx-plan says of it."""
    if records.of("export", name):
        return
    source = checkpoint(args.work, name)
    target = places(args, name).model(Contender(US, "int4"))
    if not (source / INDEX).exists():
        raise SystemExit(f"{name}: no checkpoint in {source}; run: python -m benchmarks.shapes make {name}")
    target.mkdir(parents=True, exist_ok=True)
    write_questions(source, target.parent, shape)
    vtx = Path(sys.executable).parent
    command = [
        vtx / "vtx-export",
        "--model",
        source,
        "--k",
        shape.k,
        "--precision",
        "int4",
        "--out",
        target / "bundle",
        *(["--allow-changed-answers"] if shape.torch else []),  # K, of readers of pages too
        *(["--force"] if (target / "bundle").exists() else []),
    ]
    said(f"{name}: {' '.join(map(str, command))}")
    seconds, peak, text = child(command)
    found = MEASURED.search(text)
    if found is None:
        raise SystemExit(f"{name}: vtx-export did not say what it measured:\n{text}")
    size = sum(file.stat().st_size for file in (target / "bundle").rglob("*") if file.is_file())
    asked = [
        vtx / "vtx-plan",
        "--model",
        target / "bundle",
        "--precision",
        "int4",
        "--k",
        f"none,{shape.k}",
        "--text",
        QUESTION,
        "--image-size",
        f"{shape.picture}x{shape.picture}",
        "--json",
    ]
    plan = subprocess.run([*map(str, asked)], check=True, capture_output=True, text=True).stdout
    (target / READY).write_text(f"{source.resolve()}\n{shape.k}\n", encoding="utf-8")
    records.add(
        "export",
        name,
        k=shape.k,
        seconds=seconds,
        peak_rss=peak,
        memory=found["memory"],
        predicted=found["predicted"],
        bundle=size,
        said=text.splitlines(),
        plan=json.loads(plan),
    )
    if not args.keep and not shape.torch:  # which the rival reads
        shutil.rmtree(source)


def write_questions(source: Path, folder: Path, shape: Shape) -> None:
    from benchmarks.peers import workload

    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    plan = plan_export(ExportOptions(str(source), (), "int4"))
    tokens = plan.config.layout.count(shape.picture, shape.picture) + QUESTION
    asked = workload.asked_of(plan, folder, shape.picture, tokens)
    text = Work("", "", 0, 0, asked.warm, asked.first, asked.second).to_json()
    (folder / "questions.json").write_text(text, encoding="utf-8")


def child(command: Sequence[object]) -> tuple[float, int, str]:
    """Seconds, the largest resident bytes and the error output of a command. Raises SystemExit if it fails."""
    begun = time.monotonic()
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr as said_there:
        text = said_there.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{text}")
    return time.monotonic() - begun, used.ru_maxrss << 10, text


def measure(name: str, shape: Shape, args: argparse.Namespace, records: Records) -> None:
    """Rounds of every contender that is there, each in a process of its own, beginning with another one each time."""
    if not records.of("export", name):
        said(f"{name}: no bundle; run: python -m benchmarks.shapes export {name}")
        return
    folder = args.work / name
    work = replace(
        Work.from_json((folder / "questions.json").read_text(encoding="utf-8")),
        threads=args.threads,
        new_tokens=args.new_tokens,
    )
    rival = rival_of(shape)
    ready = records.of("rival", name, contender=rival.name, failed="")
    order = [c for c in contenders(name, args.shapes) if c != rival or ready]
    for number in range(args.rounds):
        for contender in order[number % len(order) :] + order[: number % len(order)]:
            if records.of("run", name, contender=contender.name, round=number):
                continue
            model = places(args, name).model(contender)
            own = replace(work, folder=str(model.resolve()), precision=contender.precision)
            try:
                result = run(contender, own, places(args, name))
            except PeerError as error:
                records.add("run", name, contender=contender.name, round=number, failed=str(error))
                said(f"{name}, round {number + 1}: {contender.name}: {error}")
                continue
            records.add(
                "run", name, contender=contender.name, round=number, result=asdict(result), prompt=len(own.first.ids)
            )
            said(f"{name}, round {number + 1}: {contender.name}: {result.in_words()}")


# ---- tables ----------------------------------------------------------------------------------------------------------

EXPORTS = ["model", "parameters", "assumed", "K", "bundle", "export's memory", "predicted", "with the check"]
ANSWERS = ["model", "engine", "K", "computed", "first token, s", "second question, s", "a token, ms",
           "peak memory, MiB"]  # fmt: skip


def tables(records: Records, shapes: dict[str, Shape]) -> dict[str, list[list[Any]]]:
    """The rows of each table, its columns first; a table without rows is left out."""
    found = dict[str, list[list[Any]]]()
    for name, shape in shapes.items():
        exports = found.setdefault(f"{group(shape)}-export", [EXPORTS])
        answers = found.setdefault(f"{group(shape)}-answers", [ANSWERS])
        for made in records.of("export", name)[-1:]:
            (sized,) = records.of("make", name)[-1:]
            exports.append(
                [
                    shape.title,
                    f"{sized['parameters'] / 1e9:.2f} billion",
                    shape.assumed or "nothing",
                    str(made["k"]),
                    f"{made['bundle'] / 1e9:.2f} GB",
                    made["memory"] or "-",
                    made["predicted"] or "-",
                    f"{made['peak_rss'] / 1e9:.2f} GB",
                ]
            )
        for contender in contenders(name, shapes):
            answers += answer_row(records, name, shape, contender)
        for line in records.of("rival", name):
            if line["contender"] in NOT_RUN:
                answers.append(not_run(shape, line["contender"], "", line["failed"]))
    return {table: rows for table, rows in found.items() if rows[1:]}


def group(shape: Shape) -> str:
    """The first word of the names of its tables."""
    return "pages" if shape.torch else "shapes"


def answer_row(records: Records, name: str, shape: Shape, contender: Contender) -> list[list[Any]]:
    engine = "transformers" if contender == TORCH else "OpenVINO GenAI"
    k = "" if contender.k is None else str(contender.k)
    if contender.rival == US:
        engine = f"vtx, {ENGINES[contender.precision.partition('@')[2].partition('+')[0]]}"
        k = k or "none"
    runs = records.of("run", name, contender=contender.name)
    results = [Result.from_dict(line["result"]) for line in runs if "result" in line]
    if results:
        cells = [
            [f"{factor * of([getattr(r, part) for r in results]):.{digits}f}" for of in (statistics.median, min, max)]
            for part, factor, digits in (("first", 1e-3, 2), ("second", 1e-3, 2), ("decode", 1, 1), ("rss", 1, 0))
        ]
        return [[shape.title, engine, k, results[0].how or "-", *cells]]
    failures = [line["failed"] for line in (*runs, *records.of("rival", name, contender=contender.name))]
    return [not_run(shape, engine, k, reason) for reason in failures[:1] if reason]


def not_run(shape: Shape, engine: str, k: str, reason: str) -> list[Any]:
    return [shape.title, engine, k, f"not run: {reason}", "", "", "", ""]


def report(args: argparse.Namespace, records: Records) -> None:
    for rows in tables(records, args.shapes).values():
        cells = [[c if isinstance(c, str) else f"{c[0]} ({c[1]} to {c[2]})" for c in row] for row in rows]
        print(markdown(cells) + "\n")
    if not args.write:
        return
    kept = [json.loads(line) for line in TABLES.read_text(encoding="utf-8").splitlines()]
    lines = result_lines(kept, records, args.shapes)
    TABLES.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "docs/measurements/tables.py")], check=True)


def result_lines(kept: list[dict[str, Any]], records: Records, shapes: dict[str, Shape]) -> list[dict[str, Any]]:
    """The lines of TABLES: those of `kept` of other tables and other shapes, and the new ones."""
    made, titles = tables(records, shapes), {shape.title for shape in shapes.values()}
    lines = [line for line in kept if line["table"] not in made]
    for table, rows in made.items():
        step = "export" if table.endswith("-export") else "run"
        found = [line for line in records.lines if line["step"] == step and line["shape"] in shapes]
        machine = [line["machine"] for line in found if table.startswith(group(shapes[line["shape"]]))][-1]
        versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        about = f"Random weights, int4. {machine['cpu']}; {versions}"
        lines.append({"table": table, "columns": rows[0], "align": ["---"] * len(rows[0]), "caption": about})
        others = titles - {row[0] for row in rows[1:]}
        lines += [line for line in kept if line["table"] == table and line.get("row", [""])[0] in others]
        lines += [{"table": table, "row": row} for row in rows[1:]]
    return lines


def said(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


STEPS = {"make": make, "rivals": rivals, "export": export, "measure": measure}


def main(words: Sequence[str] | None = None, shapes: dict[str, Shape] | None = None) -> None:
    shapes = shapes or {**SHAPES, **PAGE_SHAPES}
    parser = argparse.ArgumentParser(
        prog="benchmarks.shapes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=[*STEPS, "report"])
    parser.add_argument("names", nargs="*", metavar="SHAPE", help=f"[default: all of {', '.join(shapes)}]")
    parser.add_argument("--work", type=Path, default=Path("build/shapes"), help="directory of all files [%(default)s]")
    parser.add_argument("--venvs", type=Path, help="environments of the rivals [default: in --work]")
    parser.add_argument("--torch", default="torch==2.13.0", help='the rivals\' torch, for pip ["%(default)s"]')
    parser.add_argument("--keep", action="store_true", help="export: keep the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--write", action="store_true", help="report: write the tables of docs/measurements, too")
    args = parser.parse_args(words)
    if unknown := sorted({*args.names} - {*shapes}):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(shapes)}")
    args.shapes = shapes
    args.work.mkdir(parents=True, exist_ok=True)
    records = Records(args.work)
    if args.step == "report":
        return report(args, records)
    for name in args.names or shapes:
        STEPS[args.step](name, shapes[name], args, records)


if __name__ == "__main__":
    main()
