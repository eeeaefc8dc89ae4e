"""All measurements of serving, one after the other, and their page: `make bench-serving`.

    python -m benchmarks.serving_suite                        half an hour on a quiet machine, once the models are made
    python -m benchmarks.serving_suite --other PYTHON         pictures and batches beside another installation of vtx
    python -m benchmarks.serving_suite --llama BUILD/bin      the load test beside llama.cpp's server, both without AMX
    python -m benchmarks.serving_suite --trial                each in its smallest form, on the demo; writes no page

The models, random weights in the shapes `1b` and `kv-of-7b`, are made first, unless --work has them. A measurement
whose file --out has is not made again, so the same command goes on where it was stopped; none begins after --minutes,
not counting the models. The page and docs/measurements/results/serving.jsonl are written at the end, from what there
is. Run it from the root of the repository; the demo must be there (`make demo`).
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from benchmarks.common import parser
from benchmarks.pictures import picture
from benchmarks.serving import given_bundle, made_checkpoint, model_options
from benchmarks.serving_results import QUIET_PERCENT, write

DEMO = Path("build/demo")
FOLLOW_UPS = Path("docs/measurements/results/follow-ups.jsonl")
KV_OF_7B = "kv-of-7b"
KS_OF_7B = "17,9"
PROGRAM = "from vtx.cli import {0}; {0}()"


class Measurement(NamedTuple):
    """A file of --out, and the words after `python -m` that write it: for a page, and those of a trial."""

    name: str
    words: list[str]
    trial: list[str]


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    if not (DEMO / "vtx.json").exists():
        sys.exit(f"there is no bundle in {DEMO}; make demo")
    if given.trial:
        given.bundle = DEMO
    bundle = given_bundle(given)
    wide = DEMO if given.trial else made_wide_bundle(given)
    judged = made_report(bundle, given)
    busy = psutil.cpu_percent(2)
    if busy > QUIET_PERCENT and not given.trial:
        print(f"the machine is {busy:g}% busy with other work; each table will say so", file=sys.stderr)
    started = time.monotonic()
    failed = list[str]()
    left = list[str]()
    for name, words, trial in measurements(given, bundle, wide, judged):
        target = given.out / f"{name}.json"
        if target.exists():
            print(f"{name}: {target} is there already", file=sys.stderr)
        elif time.monotonic() - started > 60 * given.minutes:
            left.append(name)
        else:
            print(f"{name}: minute {(time.monotonic() - started) / 60:.1f}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", *words, *(trial if given.trial else []), "--json", str(target)]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes", file=sys.stderr)
    if not given.trial:
        write(given.out)
    if left:
        print(
            f"not begun after {given.minutes:g} minutes: {', '.join(left)}; the same command goes on", file=sys.stderr
        )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def arguments() -> argparse.Namespace:
    args = parser(__doc__ or "")
    model_options(args)
    args.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server and llama-quantize")
    args.add_argument("--minutes", type=float, default=30, help="no measurement begins after these [%(default)s]")
    args.add_argument("--deadline", type=int, default=400, help="milliseconds, of a request under load [%(default)s]")
    args.add_argument("--trial", action="store_true", help="try all of it on the demo")
    args.add_argument("--out", type=Path, help="what each gave [results in --work; of a trial, trial]")
    given = args.parse_args()
    given.out = given.out or given.work / ("trial" if given.trial else "results")
    given.rounds = 1 if given.trial else given.rounds
    return given


def measurements(given: argparse.Namespace, bundle: Path, wide: Path, judged: Path) -> Iterator[Measurement]:
    """What the page shows; what matters most comes first."""
    machine = ["--threads", str(given.threads)]
    model = ["--bundle", str(bundle), "--shape", given.shape, "--precision", given.precision, "--work", str(given.work)]
    model += [*machine, *(["--compute", given.compute] if given.compute else [])]
    engine = ["--device", given.device]
    rounds = ["--rounds", str(given.rounds)]
    other = ["--other", str(given.other), "--other-name", given.other_name] if given.other else []
    other += ["--other-bundle", str(given.other_bundle)] if given.other_bundle else []
    yield Measurement("pictures", ["benchmarks.pictures", *model, *engine, *rounds], [])
    if other:
        yield Measurement("pictures-before", ["benchmarks.pictures", *model, *engine, *rounds, *other], [])
    asked = ["--pictures", "1", "--questions", "2", "--tokens", "2"]
    batch = ["benchmarks.batches", *model, *engine, "--rounds", "1", "--one-by-one", *other]
    yield Measurement("batches", batch, asked)
    for device in ("openvino", "cpu"):
        words = ["benchmarks.request_parts", *model, "--device", device, "--rounds", "1"]
        yield Measurement(f"parts-{device}", words, [])
    rates = ["--rates", "0.2,0.4,0.8", "--seconds", "40"]
    short = ["--rates", "5", "--seconds", "2"]
    ks = ["--ks", "none" if given.trial else "none,9"]
    yield Measurement("load", ["benchmarks.load", *model, *engine, *ks, *rates], [*short, "--tokens", "2"])
    if given.llama:
        words = ["benchmarks.load", *model, *engine, *ks, *rates, "--llama", str(given.llama), "--no-amx"]
        yield Measurement("load-no-amx", words, [])
    words = ["benchmarks.follow_ups", *model, *engine, *rounds, "--results", str(FOLLOW_UPS)]
    words += ["--llama", str(given.llama), "--no-amx"] if given.llama else []
    trial = ["--clients", "2", "--tokens", "2", "--ks", "none", "--results", str(given.out / "follow-ups.jsonl")]
    yield Measurement("follow-ups", words, trial)
    words = ["benchmarks.deadlines", "--bundle", str(bundle), "--report", str(judged), *engine, *machine]
    words += ["--work", str(given.work), "--deadline", str(given.deadline)]
    words += ["--rates", "0.25,0.5,1,2", "--seconds", "15"]
    yield Measurement("deadlines", words, short)
    if not given.trial:
        words = ["benchmarks.deadlines", "--bundle", str(DEMO), "--report", str(made_report(DEMO, given)), *engine]
        words += [*machine, "--work", str(given.work), "--rates", "10,20,40,80", "--seconds", "10"]
        yield Measurement("deadlines-demo", words, [])
    for device in ("openvino", "cpu"):
        words = ["benchmarks.conversations", str(wide), "--device", device, *machine]
        yield Measurement(f"conversations-{device}", words, ["--conversations", "2", "--tokens", "2"])
        sharing = [*words, "--one-picture", "--conversations", "4"]
        yield Measurement(f"one-picture-{device}", sharing, ["--conversations", "2", "--tokens", "2"])
    for device in ("openvino", "cpu"):
        words = ["benchmarks.towers", str(bundle), "--device", device, *machine, "--rounds", "2"]
        yield Measurement(f"towers-{device}", words, [])
    words = ["benchmarks.serving_soak", str(DEMO), *engine, *machine, "--minutes", "8", "--requests", "10000"]
    yield Measurement("soak", words, ["--minutes", "0.2", "--bodies", "20"])


def made_wide_bundle(given: argparse.Namespace) -> Path:
    """A bundle with the K and V of a 7B, and hardly any other weights."""
    folder: Path = given.work / f"bundle-{KV_OF_7B}"
    if not (folder / "vtx.json").exists():
        checkpoint = made_checkpoint(given.work / f"checkpoint-{KV_OF_7B}", KV_OF_7B)
        run(
            "export",
            "--model",
            checkpoint,
            "--out",
            folder,
            "--precision",
            "fp16",
            "--k",
            KS_OF_7B,
            "--max-context",
            2048,
        )
    return folder


def made_report(bundle: Path, given: argparse.Namespace) -> Path:
    """vtx-eval's report on how often each K gives the answer that the bundle gives without withdrawal."""
    folder: Path = given.work / f"judged-{bundle.name}"
    judged = folder / "judged" / "report.json"
    if judged.exists():
        return judged
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / "questions.jsonl"
    answers = folder / "answers.jsonl"
    lines = list[dict[str, Any]]()
    for number in range(2 if given.trial else 6):
        (folder / f"{number}.png").write_bytes(base64.b64decode(picture(number).partition(",")[2]))
        lines += [{"image": f"{number}.png", "question": f"question {n}: what is there?"} for n in range(4)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    common = ["--bundle", bundle, "--device", given.device, "--threads", given.threads, "--max-new-tokens", 4]
    run("batch", questions, answers, "--k", "none", *common)
    wanted = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    lines = [{**line, "answer": answer} for line, answer in zip(lines, wanted, strict=True)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    ks = "none,6" if bundle == DEMO else "none,9"
    run("evaluate", "exact", questions, "--k", ks, "--no-times", "--out", judged.parent, *common)
    return judged


def run(command: str, *words: Any) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM.format(command), *map(str, words)], check=True)


if __name__ == "__main__":
    main()
