"""vtx-eval: benchmarks over local files. It parses, calls and prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.export import find_bundle
from vtx.commands.shared.options import (
    bundle_option,
    compute_option,
    device_option,
    fit_option,
    threads_option,
)
from vtx.runtime.errors import DeviceError
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, say_report
from vtx.runtime.terminal.depth import Depth, DepthType, joined

if TYPE_CHECKING:
    from vtx.runtime.api.model import Model
    from vtx.tools.bench.methods import Method
    from vtx.tools.evaluation.ask import Asked
    from vtx.tools.evaluation.questions import QuestionSet
    from vtx.tools.evaluation.report import Evaluation

TASKS = ("pope", "mme", "scienceqa", "vqav2", "textvqa", "exact")


@command(
    epilog="vtx-eval pope coco_pope_adversarial.json --images val2014 --k none,16,8\n"
    "vtx-eval mme MME_Benchmark_release_version --samples 400 --reduce none --reduce fastv\n"
    "vtx-eval vqav2 questions.json --annotations annotations.json --images val2014 --samples 2000\n"
    'vtx-eval exact questions.jsonl --instruction "Answer in one word." --json'
)
@click.argument("task", type=click.Choice(TASKS, case_sensitive=False))
@click.argument("data", type=click.Path(path_type=Path))
@bundle_option
@click.option("--images", type=click.Path(path_type=Path), help="Where images lie [default: beside DATA].")
@click.option("--annotations", type=click.Path(path_type=Path), help="VQAv2's answers.")
@click.option("--split", default="test", show_default=True, help="ScienceQA's.")
@click.option(
    "--k", "ks", type=DepthType(several=True), multiple=True, callback=joined, metavar="K,K,...",
    help="Prebuilt K, none, auto [default: with --reduce none, else all there are].",
)  # fmt: skip
@click.option(
    "--reduce", "reduces", multiple=True, metavar="SPEC|none",
    help="A reduction, again for more; each with every K [default: with --k none, else all there are].",
)  # fmt: skip
@click.option("--instruction", help='Said after each question, "" for nothing [default: the benchmark\'s].')
@click.option("--samples", type=int, help="Questions at most, all about an image or none [default: all].")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw.")
@click.option("--max-new-tokens", type=int, default=32, show_default=True)
@click.option("--no-times", is_flag=True, help="Leave times out: on a machine that does other work they say nothing.")
@device_option
@compute_option
@threads_option
@fit_option
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="Folder for answers, report and plot [default: vtx-eval-TASK-BUNDLE].",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object on stdout, and nothing else.")
def evaluate(
    task: str, data: Path, bundle: str | None, images: Path | None, annotations: Path | None, split: str,
    ks: tuple[Depth, ...], reduces: tuple[str, ...], instruction: str | None, samples: int | None, seed: int,
    max_new_tokens: int, no_times: bool, device: str, compute: str | None, threads: int | None, fit: str | None,
    out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Judge a bundle by a benchmark, at every K and with every reduction, accuracy beside cost.

    TASK says what DATA is: a file of POPE, MME's directory, ScienceQA's problems.json, the questions of VQAv2 or
    TextVQA, or lines of {"image", "question", "answer"}. An interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    from vtx.runtime.api.load import load
    from vtx.tools.bench.methods import find_methods
    from vtx.tools.evaluation.ask import check_methods, make_methods
    from vtx.tools.evaluation.formats import FORMATS
    from vtx.tools.evaluation.metrics import METRICS
    from vtx.tools.evaluation.questions import Where, read_questions
    from vtx.tools.evaluation.report import make_report

    named = make_methods(ks or (None,), reduces or ("none",)) if ks or reduces else ()
    folder = data if data.is_dir() else data.parent
    where = Where(data, (images or folder).expanduser().resolve(), annotations, split)
    said = FORMATS[task].instruction if instruction is None else instruction
    questions = read_questions(FORMATS[task], where, instruction=said, samples=samples, seed=seed)
    for line in questions.skipped:
        note(f"skipped {line}")
    path = find_bundle(bundle, ks)
    target = out or Path(f"vtx-eval-{task}-{path.name}")
    with load(path, device=device, compute=compute, threads=threads, fit=fit) as model:
        gates = ["auto"] if model.manifest.gates else []
        methods = named or find_methods(model.manifest, (*model.manifest.variants, *gates))
        check_methods(model, methods)
        asked = _ask(model, questions, methods, max_new_tokens, target)
        for line in asked.skipped[len(questions.skipped) :]:
            note(f"skipped {line}")
        made = make_report(task, METRICS[task], questions.source, asked, model, instruction=said, times=not no_times)
    _write(made, target, as_json=as_json)
    note(f"answers, report and plot are in {target}")


def _ask(model: Model, questions: QuestionSet, methods: Sequence[Method], max_new_tokens: int, target: Path) -> Asked:
    """Every method's answers, with a forecast after the first question and a bar."""
    from vtx.runtime.units import counted, duration
    from vtx.tools.evaluation.ask import ask_all

    amount = f"{counted(len(questions.questions), 'question')} of {questions.source}, {counted(len(methods), 'method')}"
    with bar() as report:
        return ask_all(
            model, questions, methods, max_new_tokens, target / "answers.jsonl", report=report,
            predict=lambda seconds: note(f"{amount}; predicted: about {duration(seconds)}"),
        )  # fmt: skip


def _write(made: Evaluation, target: Path, *, as_json: bool) -> None:
    """The report as a file, a plot, and tables or JSON on stdout."""
    from vtx.tools.common.files import write_json
    from vtx.tools.evaluation.plots import draw_report
    from vtx.tools.evaluation.tables import in_tables

    write_json(target / "report.json", made.to_dict())
    try:
        draw_report(made, target / "pareto.png")
    except DeviceError as e:
        note(f"no plot: {e}; run again then, nothing is asked twice")
    if as_json:
        say_json(made.to_dict())
    else:
        say_report(in_tables(made))
