"""Answers a second of vtx-batch and vtx-eval, several questions about each picture.

    python -m benchmarks.batches                                         the shape 1b, int8
    python -m benchmarks.batches --one-by-one                            beside --parallel 1 of the same commands
    python -m benchmarks.batches --other ../before/.venv/bin/python      beside another installation of vtx

The sides take turns. A batch of one line is measured, too, and its seconds are taken off: they are those of
loading. vtx-eval runs with --no-times. Run it from the root of the repository on a quiet machine.
"""

from __future__ import annotations

import base64
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.common import parser, report
from benchmarks.pictures import picture
from benchmarks.serving import given_bundle, model_options

PROGRAM = "from vtx.cli import {0}; {0}()"


def main() -> None:
    args = parser(__doc__ or "")
    model_options(args)
    args.add_argument("--pictures", type=int, default=4)
    args.add_argument("--questions", type=int, default=6, help="about each picture [%(default)s]")
    args.add_argument("--tokens", type=int, default=16, help="of an answer at most [%(default)s]")
    args.add_argument("--one-by-one", action="store_true", help="answer one line at a time, too")
    args.add_argument("--k", default="none", help="of vtx-eval, separated by commas [%(default)s]")
    given = args.parse_args()
    bundle = given_bundle(given)
    folder = given.work / "batches"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lines = []
    for n in range(given.pictures):
        (folder / f"{n}.png").write_bytes(base64.b64decode(picture(n).partition(",")[2]))
        lines += [
            {"image": f"{n}.png", "question": f"question {q}: what is there, and how many?", "answer": "yes"}
            for q in range(given.questions)
        ]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "one.jsonl").write_text(json.dumps(lines[0]))
    common = ["--device", given.device, "--threads", str(given.threads)]
    common += ["--max-new-tokens", str(given.tokens), *(["--compute", given.compute] if given.compute else [])]
    out = folder / "out"
    work = {
        "one": ["batch", str(folder / "one.jsonl"), str(out), "--k", "none", *common],
        "vtx-batch": ["batch", str(folder / "lines.jsonl"), str(out), "--k", "none", *common],
        "vtx-eval": [
            "evaluate",
            "exact",
            str(folder / "lines.jsonl"),
            "--k",
            given.k,
            "--no-times",
            "--out",
            str(out),
            *common,
        ],
    }
    ours = ["--bundle", str(bundle)]
    sides: dict[str, tuple[Path, list[str]]] = {"vtx": (Path(sys.executable), ours)}
    if given.one_by_one:
        sides["one at a time"] = Path(sys.executable), [*ours, "--parallel", "1"]
    if given.other:
        sides[given.other_name] = given.other, ["--bundle", str(given.other_bundle or bundle)]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(given.rounds):
        for name, words in work.items():
            for installation, (python, more) in sorted(sides.items(), reverse=bool(number % 2)):
                found.setdefault((installation, name), []).append(took(python, [*words, *more], out))
    amounts = {"vtx-batch": len(lines), "vtx-eval": len(lines) * len(given.k.split(","))}
    rows = []
    table = [["", "answers", "answers/s", "CPU s per answer"]]
    for (installation, name), values in found.items():
        if name == "one":
            continue
        alone = found[installation, "one"]
        wall, cpu = (median(v[part] - o[part] for v, o in zip(values, alone, strict=True)) for part in (0, 1))
        rows.append(
            {
                "installation": installation,
                "command": name,
                "model": given.shape,
                "precision": given.precision,
                "answers": amounts[name],
                "answers_a_second": amounts[name] / wall,
                "cpu_s_an_answer": cpu / amounts[name],
                "rounds": values,
                "one": alone,
            }
        )
        figures = f"{amounts[name] / wall:.2f}", f"{cpu / amounts[name]:.3f}"
        table.append([f"{installation}: {name}", str(amounts[name]), *figures])
    report({"rows": rows}, table, given.json)


def took(python: Path, words: list[str], out: Path) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of a command whose output is removed before."""
    shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    subprocess.run(
        [str(python), "-c", PROGRAM.format(words[0]), *words[1:]],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
