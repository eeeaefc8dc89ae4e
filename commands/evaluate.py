"""vtx-eval: benchmarks over local files. It parses, calls and prints."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.bundles import find_bundle
from vtx.commands.shared.options import PATH, Depth, option, options
from vtx.runtime.errors import DeviceError
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, say_report
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from vtx.runtime.bundle.card import Acceptance
    from vtx.runtime.prompt.guiding import Guide
    from vtx.tools.bench.methods import Method
    from vtx.tools.evaluation.ask import Asked, Evaluated
    from vtx.tools.evaluation.metrics import Metric
    from vtx.tools.evaluation.questions import Format, QuestionFiles, QuestionSet


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The options of vtx-eval."""

    task: str
    data: Path
    bundle: str | None
    images: Path | None
    protocol: str
    annotations: Path | None
    split: str
    ks: tuple[Depth, ...]
    reduces: tuple[str, ...]
    rests: tuple[str, ...]
    instruction: str | None
    samples: int | None
    seed: int
    max_new_tokens: int
    guide: Guide | None
    coverage: float | None
    sign: Path | None
    no_times: bool
    parallel: int
    loading: Loading
    out: Path | None
    as_json: bool

    @property
    def files(self) -> QuestionFiles:
        """The files of the questions."""
        from vtx.tools.evaluation.questions import QuestionFiles

        folder = self.data if self.data.is_dir() else self.data.parent
        return QuestionFiles(self.data, (self.images or folder).expanduser().resolve(), self.annotations, self.split)


TASKS = ("pope", "mme", "scienceqa", "vqav2", "textvqa", "gqa", "vizwiz", "seedbench", "choices", "exact")


@command(
    epilog="vtx-eval pope coco_pope_adversarial.json --images val2014 --k none,16,8\n"
    "vtx-eval mme MME_Benchmark_release_version --samples 400 --reduce none --reduce fastv\n"
    "vtx-eval vqav2 questions.json --annotations annotations.json --images val2014 --samples 2000\n"
    "vtx-eval scienceqa ScienceQA --protocol lmms-eval --max-new-tokens 16\n"
    'vtx-eval exact questions.jsonl --instruction "Answer in one word." --json'
)
@click.argument("task", type=click.Choice(TASKS, case_sensitive=False))
@click.argument("data", type=PATH)
@options(
    "bundle",
    "images",
    option(
        "--protocol",
        "authors",
        "Prompts and scoring of the benchmark's authors, or of lmms-eval's tasks.",
        type=click.Choice(["authors", "lmms-eval"]),
    ),
    option("--annotations", Path, "VQAv2 answer file."),
    option("--split", "test", "ScienceQA split."),
    "ks",
    option(
        "--reduce reduces",
        str,
        "Token reduction; repeat for more, each measured at every K [default: all in the bundle; with --k, none].",
        multiple=True,
        metavar="SPEC|none",
    ),
    option(
        "--rest rests",
        str,
        "Image tokens that stay from each K on, a share or a number; repeat for more, each measured beside none.",
        multiple=True,
        metavar="N%|N",
    ),
    option("--instruction", str, 'Suffix for each question, "" for none [default: the benchmark\'s].'),
    option("--samples", int, "Maximum number of questions; those of one image stay together [default: all]."),
    "seed",
    option("--max-new-tokens", 32),
    "choices",
    option(
        "--coverage",
        float,
        "With --choices: also accuracy against coverage by threshold; the laxest threshold at "
        "which accepted answers are shown to be right this often goes into the bundle's card.",
        metavar="ACCURACY",
    ),
    option(
        "--sign", Path, "Sign the card with this private Ed25519 key (PEM); required for signed bundles.", metavar="KEY"
    ),
    option("--no-times", bool, "Skip timings, e.g. on a busy machine."),
    option("--parallel", 8, "Concurrent answers, except while timing.", type=click.IntRange(1)),
    "device",
    "compute",
    "threads",
    "fit",
    option("--out", Path, "Output directory for answers, report and plot [default: vtx-eval-TASK-BUNDLE]."),
    "report",
    record=EvaluationSettings,
)
def evaluate(settings: EvaluationSettings) -> None:
    """Evaluate a bundle on a benchmark, at every K and with every reduction: accuracy and cost.

    TASK is the kind of DATA: a file of POPE, MME's directory, ScienceQA's problems.json, the questions of VQAv2,
    TextVQA, GQA, VizWiz or SEED-Bench, lines of {"image", "question", "choices", "answer"} (choices), or of {"image",
    "question", "answer"} (exact). An interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    from vtx.tools.common.files import write_json
    from vtx.tools.evaluation.questions import read_questions
    from vtx.tools.evaluation.report import TaskForm, make_report, scored_answers
    from vtx.tools.evaluation.tables import draw_report, in_tables

    methods = _named_methods(settings)
    form, metric = _protocol(settings)
    suffix = form.instruction if settings.instruction is None else settings.instruction
    questions = read_questions(form, settings.files, instruction=suffix, samples=settings.samples, seed=settings.seed)
    _say_skipped(questions.skipped)
    path = find_bundle(settings.bundle, settings.ks)
    target = settings.out or Path(f"vtx-eval-{settings.task}-{path.name}")
    with ExitStack() as resources:
        by, methods = _answerer(settings, path, methods, resources)
        answers = _ask(settings, by, questions, methods, target)
        _say_skipped(answers.skipped[len(questions.skipped) :])
        report = make_report(
            answers,
            by,
            metric,
            TaskForm(settings.task, questions.source, suffix, settings.protocol),
            times=not settings.no_times and by.alone is not None,
            coverage=settings.coverage is not None,
        )
        if settings.coverage is not None:
            scored = scored_answers(answers, metric)
            acceptance = scored.acceptance(settings.coverage, questions.source, methods[0].name)
            _accept(path, acceptance, settings.coverage, settings.sign)
    write_json(target / "report.json", report.to_dict())
    try:
        draw_report(report, target / "pareto.png")
    except DeviceError as e:
        note(f"plot skipped: {e}; rerun to draw it, answers are kept")
    if settings.as_json:
        say_json(report.to_dict())
    else:
        say_report(in_tables(report))
    note(f"answers, report and plot are in {target}")


def _say_skipped(lines: Iterable[str]) -> None:
    for line in lines:
        note(f"skipped {line}")


def _named_methods(settings: EvaluationSettings) -> tuple[Method, ...]:
    """The methods that the options name, none for the bundle's. Raises click's UsageError for what does not fit."""
    from vtx.tools.evaluation.ask import make_methods
    from vtx.tools.evaluation.coverage import check_target

    if settings.rests and not any(isinstance(k, int) for k in settings.ks):
        raise click.UsageError("--rest is what stays from K on; name one or more with --k")
    if settings.coverage is not None:
        check_target(settings.coverage)
        if settings.guide is None:
            raise click.UsageError("--coverage needs the probabilities of choices: add --choices A,B,...")
    if not settings.ks and not settings.reduces:
        return ()
    return make_methods(settings.ks or (None,), settings.reduces or ("none",), settings.rests)


def _protocol(settings: EvaluationSettings) -> tuple[Format, Metric]:
    """The task's file format and its metric, in the chosen protocol."""
    from vtx.tools.evaluation import formats, metrics

    form = formats.FORMATS[settings.task]
    metric = metrics.METRICS[settings.task]
    if settings.protocol != "lmms-eval":
        return form, metric
    return formats.LMMS_EVAL.get(settings.task, form), metrics.LMMS_EVAL.get(settings.task, metric)


def _answerer(
    settings: EvaluationSettings, path: Path, named: tuple[Method, ...], resources: ExitStack
) -> tuple[Evaluated, tuple[Method, ...]]:
    """A model, and the methods to ask: those `named`, else the bundle's."""
    from vtx.tools.bench.methods import find_methods
    from vtx.tools.evaluation.ask import Evaluated, make_methods

    model = resources.enter_context(settings.loading.load(path))
    by = Evaluated.of(model, named, settings.parallel)
    if settings.coverage is not None and not named:  # what a question gets that names nothing
        named = make_methods((model.loaded.defaults.k,), (model.loaded.defaults.reduce or "none",))
    manifest = by.bundle.manifest
    return by, named or find_methods(manifest, (*manifest.variants, *(["auto"] if manifest.gates else [])))


def _ask(
    settings: EvaluationSettings, by: Evaluated, questions: QuestionSet, methods: tuple[Method, ...], target: Path
) -> Asked:
    """Every question under every method, with a prediction before and a bar during."""
    from vtx.runtime.units import counted, duration
    from vtx.tools.evaluation.ask import TIMED, Inquiry, ask_all

    timed = 0 if settings.no_times else TIMED
    inquiry = Inquiry(questions, methods, settings.max_new_tokens, settings.guide, timed)
    amount = f"{counted(len(questions.questions), 'question')} of {questions.source}"

    def predict(seconds: float) -> None:
        note(f"{amount}, {counted(len(methods), 'method')}; predicted: at most {duration(seconds)}")

    with bar() as report:
        return ask_all(by, inquiry, target / "answers.jsonl", report=report, predict=predict)


def _accept(folder: Path, acceptance: Acceptance | None, target: float, sign: Path | None) -> None:
    """Write a threshold into the bundle's card, and say what it is."""
    from vtx.runtime.bundle.bundle import CARD, Bundle
    from vtx.runtime.bundle.card import read_card, write_card
    from vtx.runtime.bundle.seal import SIGNATURE, SigningKey

    if acceptance is None:
        note(f"no threshold is shown to accept answers of which {target:.3g} are right; the card stays as it is")
        return
    note(
        f"accepted from {acceptance.threshold:g}: {acceptance.coverage:.1%} of the answers, {acceptance.accuracy:.1%} "
        f"of them right (at least {acceptance.low:.1%})"
    )
    bundle = Bundle.open(folder)
    card = read_card(bundle)
    if card is None:
        note(f"{folder} has no card to write it to; run vtx-fit first, or ask with --accept {acceptance.threshold:g}")
    elif bundle.files.exists(CARD + SIGNATURE) and sign is None:
        note(f"the card of {folder} is signed, so it stays as it is; give the key with --sign KEY")
    else:
        write_card(folder, replace(card, accept=acceptance), None if sign is None else SigningKey.load(sign))
        note(f"written to {folder / CARD}; --accept card applies it")
