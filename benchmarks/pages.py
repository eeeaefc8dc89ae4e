"""What does a reader of drawn pages still read at each K, with a rest, and with each reduction?

    python demo/reader.py --batch 8 --questions 6
    python demo/publish.py --run build/reader --out build/reader/model
    python demo/pages.py --kinds all line --out build/pages
    python -m benchmarks.pages build/reader/model build/pages --write

The bundle is in float32 on onnxruntime. All lines of a page are asked for, a line by its place, a number by its letter
and whether a letter is there. A character is right if it stands at its place in the answer, an answer if it is right to
the letter. Intervals are over pages. A run that was interrupted resumes; `--write` puts the rows into the results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import markdown
from benchmarks.rest_tables import shown, write_tables

from vtx.tools.bench.methods import Method
from vtx.tools.data.intervals import grouped_share
from vtx.tools.evaluation.ask import Asked, CostedAnswer, make_methods

KS = (3, 4, 5, 6)
RESTS = ("10%", "40%")
REDUCTIONS = {  # with about half of the image tokens, and with a quarter
    "random": ("random:keep=0.5", "random:keep=0.25"),
    "cls": ("cls:keep=0.5", "cls:keep=0.25"),
    "divprune": ("divprune:keep=0.5", "divprune:keep=0.25"),
    "cdpruner": ("cdpruner:keep=0.5", "cdpruner:keep=0.25"),
    "dart": ("dart:keep=0.5", "dart:keep=0.25"),
    "visionzip": ("visionzip:dominant=0.4,contextual=0.1", "visionzip:dominant=0.2,contextual=0.05"),
    "hiprune": ("hiprune:layer=2,keep=0.5", "hiprune:layer=2,keep=0.25"),
    "fastv": ("fastv:ratio=0.5", "fastv:ratio=0.75"),
    "pyramiddrop": ("pyramiddrop:layers=2/4,ratio=0.7", "pyramiddrop:layers=2/4,ratio=0.5"),
    "mustdrop": ("mustdrop:layers=2/4,gamma=0.03,alpha=0.03", "mustdrop:layers=2/4,gamma=0.1,alpha=0.1"),
    "lsm": ("lsm:tau=0.5", "lsm:tau=0.3"),
}
SPECS = tuple(spec for specs in REDUCTIONS.values() for spec in specs)
ASKED = {"read": "all", "line": "line", "what": "number", "is": "letter"}  # the kind by a question's first word
WHOLE = {"all": "whole pages", "line": "a line", "number": "a number", "letter": "a letter?"}
LINES = "lines of a page"


def export(checkpoint: Path, folder: Path) -> Path:
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    if not folder.exists():
        options = ExportOptions(str(checkpoint), KS, "fp32", dialects=("ort",), reductions=("none", *SPECS))
        run_export(plan_export(options), folder, force=False, report=lambda *_: None)
    return folder


def answered(bundle: Path, pages: Path, journal: Path, threads: int) -> Asked:
    from vtx.runtime.api.load import load
    from vtx.tools.evaluation.ask import Evaluated, Inquiry, ask_all
    from vtx.tools.evaluation.formats import FORMATS
    from vtx.tools.evaluation.questions import QuestionFiles, read_questions

    methods = (*make_methods((None, *KS), ("none",), RESTS), *make_methods((None,), SPECS))
    questions = read_questions(FORMATS["exact"], QuestionFiles(pages / "questions.jsonl", pages))
    with load(bundle, device="cpu", threads=threads) as model:
        by = Evaluated.of(model, methods)
        inquiry = Inquiry(questions, methods, 32, timed=0)
        return ask_all(by, inquiry, journal, report=lambda *_: None, predict=lambda _: None)


def equal(right: Sequence[str], given: Sequence[str]) -> list[bool]:
    """Which of the parts of the right answer stand at their places in the given one."""
    return [part == other for part, other in zip_longest(right, given[: len(right)])]


def lines(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[place : place + 2]) for place in range(0, len(words), 2)]


def row(asked: Asked, method: Method, replies: Sequence[CostedAnswer]) -> dict[str, Any]:
    """The cells of a method: image tokens in the mean over layers, and shares that are right, with intervals."""
    flags = dict[str, tuple[list[bool], list[int]]]()
    images = {name: number for number, name in enumerate(dict.fromkeys(one.image for one in asked.questions))}

    def note(name: str, right: list[bool], page: int) -> None:
        of_name = flags.setdefault(name, ([], []))
        of_name[0].extend(right)
        of_name[1].extend([page] * len(right))

    for question, reply in zip(asked.questions, replies, strict=True):
        kind = ASKED[question.text.split()[0]]
        (right,) = question.answers
        page = images[question.image]
        text = reply.text.strip()
        if kind == "all":
            note("characters of a page", equal(right.replace(" ", ""), text.replace(" ", "")), page)
            note(LINES, equal(lines(right), lines(text)), page)
        note(WHOLE[kind], [right == text], page)
    tokens = np.mean([reply.vision_tokens for reply in replies])
    shares = {name: grouped_share(*of_name) for name, of_name in flags.items()}
    cells = {name: [f"{100 * value:.1f}" for value in (one.share, one.low, one.high)] for name, one in shares.items()}
    return {"": method.name, "image tokens": f"{tokens:.1f}", **cells}


def tables(rows: Sequence[dict[str, Any]], layers: int, caption: str) -> Iterator[list[dict[str, Any]]]:
    """All rows, then the lines of pages that are right: at each K by its rest, and by reduction and budget."""
    right = {row[""]: row[LINES][0] for row in rows}
    yield [*_table("pages", [*rows[0]], [[*row.values()] for row in rows], caption)]
    depths = [[f"K = {k}", *(f"K = {k} + rest {rest}" for rest in RESTS)] for k in KS]
    by_rest = [[f"{names[0]} of {layers}", *(right[name] for name in names)] for names in depths]
    yield [*_table("pages-k", ["", "no rest", *RESTS], by_rest)]
    by_method = [
        [f"`{name}`", *(right[method.name] for method in make_methods((None,), specs))]
        for name, specs in REDUCTIONS.items()
    ]
    yield [*_table("pages-reduced", ["", "half", "a quarter"], by_method)]


def _table(
    name: str, columns: list[str], rows: list[list[Any]], caption: str | None = None
) -> Iterator[dict[str, Any]]:
    head = {"table": name, "columns": columns, "align": ["---", *["---:"] * (len(columns) - 1)]}
    yield head if caption is None else head | {"caption": caption}
    yield from ({"table": name, "row": row} for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("pages", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the rows into the results")
    args = parser.parse_args()
    bundle = export(args.checkpoint, args.pages / "bundle")
    asked = answered(bundle, args.pages, args.pages / "answers.jsonl", args.threads)
    rows = [
        row(asked, method, [replies[place] for replies in asked.replies]) for place, method in enumerate(asked.methods)
    ]
    print(markdown([[*rows[0]], *([shown(cell) for cell in one.values()] for one in rows)]))
    if args.write:
        layers = json.loads((args.checkpoint / "config.json").read_text())["text_config"]["num_hidden_layers"]
        pages = len({question.image for question in asked.questions})
        caption = f"a reader of {layers} layers (demo/reader.py), fp32 on onnxruntime, {pages} drawn pages, right in %"
        write_tables({table[0]["table"]: table for table in tables(rows, layers, caption)})


if __name__ == "__main__":
    main()
