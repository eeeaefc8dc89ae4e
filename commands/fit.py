"""vtx-fit: the configuration that keeps a budget. It parses, calls and prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import PATH, given, option, options
from vtx.runtime.errors import BundleError, DeviceError, ExportError, RequestError
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, say_report
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.card import Card
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.tools.bench.machine import Machine
    from vtx.tools.fit.asking import Questions
    from vtx.tools.fit.fit import Fitted
    from vtx.tools.fit.search import Budget
    from vtx.tools.fit.settings import LoadedOn


@dataclass(frozen=True, slots=True)
class FitSettings:
    """The options of vtx-fit."""

    bundles: tuple[Path, ...]
    questions: str
    images: Path | None
    samples: int | None
    keep: float
    accuracy_drop: float | None
    first_token: float | None
    per_token: float | None
    memory: float | None
    profile: str | None
    max_new_tokens: int
    seed: int
    loading: Loading
    sign: Path | None
    no_card: bool
    check: bool
    out: Path | None
    as_json: bool

    @property
    def threads(self) -> int:
        from vtx.runtime.host.machine import cores

        return cores() if self.loading.threads is None else self.loading.threads


def _share(_: click.Context, __: click.Parameter, value: str) -> float:
    """98% or 0.98 as a share."""
    try:
        return float(value.removesuffix("%")) / 100 if value.endswith("%") else float(value)
    except ValueError as e:
        raise click.BadParameter(f"{value!r:.40} is not a share of the answers, e.g. 98%") from e


@command(
    epilog="vtx-fit llava-7b --questions questions.jsonl --images photos --keep 98%\n"
    "vtx-fit llava-fp16 llava-int8 llava-int4 --questions questions.jsonl --keep 95% --first-token 800 --memory 8\n"
    "vtx-fit llava-7b --questions questions.jsonl --accuracy-drop 1\n"
    "vtx-fit llava-7b --questions questions.jsonl --profile orin-nx-16 --first-token 900\n"
    "vtx-fit llava-7b --questions questions.jsonl --images photos --check"
)
@click.argument("bundles", type=PATH, nargs=-1, required=True, metavar="BUNDLE [BUNDLE ...]")
@options(
    option(
        "--questions",
        str,
        "Your questions, in the format of vtx-calibrate, answers optional; scenes: drawn scenes, for the demo.",
        required=True,
        metavar="FILE",
    ),
    "images",
    option("--samples", int, "Maximum number of questions, sampled from the file [default: all]."),
    option("--keep", "98%", "Minimum share of answers equal to the full model's.", callback=_share, metavar="SHARE"),
    option(
        "--accuracy-drop",
        float,
        "Instead of --keep, for questions with answers: limit on the share that turns from right to wrong.",
        metavar="POINTS",
    ),
    option("--first-token", float, "Limit on the 99th percentile of the time to first token.", metavar="MS"),
    option(
        "--per-token",
        float,
        "Limit on the 99th percentile of the time per output token, averaged within an answer.",
        metavar="MS",
    ),
    option("--memory", float, "Memory limit.", metavar="GB"),
    option(
        "--profile",
        str,
        "Choose for this device, by vtx-plan's estimates of time and memory; --device names its engine.",
        metavar="NAME",
    ),
    option("--max-new-tokens", 32, "Maximum tokens per answer."),
    option("--seed", 0, "Seed of the split into search and held-out questions."),
    "device",
    "compute",
    "threads",
    option(
        "--sign", Path, "Sign the card with this private Ed25519 key (PEM); required for signed bundles.", metavar="KEY"
    ),
    option("--no-card", bool, "Do not write a card."),
    option("--check", bool, "Only check the bundle's existing card on these questions."),
    option("--out", Path, "Output directory for answers, report and plot [default: vtx-fit-BUNDLE]."),
    "report",
    record=FitSettings,
)
def fit(settings: FitSettings) -> None:
    """Find the fastest configuration of a model's bundles within a budget, and write it into a card.

    Half of the images are used to search over precision (the bundles), arithmetic, K, reductions, tiles and pixels.
    The other half tests the result. The card makes it the default of vtx-run, vtx-chat, vtx-serve and the APIs. An
    interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.tools.bench.machine import describe
    from vtx.tools.fit.asking import split
    from vtx.tools.fit.fit import check_enough
    from vtx.tools.fit.report import make_card

    budget = _budget(settings)
    key = None if settings.sign is None else SigningKey.load(settings.sign)
    bundles = [Bundle.open(folder) for folder in settings.bundles]
    questions = _questions(settings)
    if settings.check:
        _check_cards(bundles, questions)
        return
    if key is None and not settings.no_card:
        _check_unsigned(bundles)
    for line in questions.data.skipped:
        note(f"skipped {line}")
    check_enough(questions, split(questions, settings.seed)[1], budget)
    target = settings.out or Path(f"vtx-fit-{bundles[0].folder.name}")
    machine = describe()
    fitted = _search(settings, budget, bundles, questions, target, machine)
    _report(fitted, questions, target, machine, as_json=settings.as_json)
    if fitted.chosen is None:
        raise RequestError("; ".join(fitted.verdict[:2]))
    if not settings.no_card:
        card = make_card(fitted, fitted.chosen, questions, machine, settings.max_new_tokens, settings.threads)
        _write_card(fitted.chosen.on.bundle.folder, card, key)
    note(f"answers, report and plot are in {target}")


def _budget(settings: FitSettings) -> Budget:
    from vtx.tools.fit.search import Budget

    drop = settings.accuracy_drop
    if drop is not None and given("keep"):
        raise RequestError("--keep and --accuracy-drop are mutually exclusive; give one of them")
    least = settings.keep if drop is None else 1 - drop / 100
    return Budget(least, settings.first_token, settings.per_token, drop is not None)


def _questions(settings: FitSettings) -> Questions:
    from vtx.tools.data.items import SCENES, read_data
    from vtx.tools.fit.asking import Questions

    if settings.samples is None and settings.questions == SCENES:
        raise RequestError("--questions scenes draws as many scenes as it is told; give a number, e.g. --samples 1200")
    samples = 1 << 30 if settings.samples is None else settings.samples
    return Questions.of(read_data(settings.questions, settings.images, samples, settings.seed))


def _check_unsigned(bundles: Sequence[Bundle]) -> None:
    """Raise RequestError if a bundle is signed: its card would have to be, too."""
    from vtx.runtime.bundle.seal import SIGNATURE

    signed = [bundle for bundle in bundles if bundle.files.exists("vtx.json" + SIGNATURE)]
    if signed:
        raise RequestError(
            f"{signed[0].folder} is signed, and devices that ask for its signature refuse a card without one; give the "
            "key with --sign KEY, or leave the bundle as it is with --no-card"
        )


def _search(
    settings: FitSettings,
    budget: Budget,
    bundles: Sequence[Bundle],
    questions: Questions,
    target: Path,
    machine: Machine,
) -> Fitted:
    """The fastest configuration within the budget, for all questions and for each kind."""
    from vtx.runtime.units import counted, duration
    from vtx.tools.data.journal import ResultJournal
    from vtx.tools.fit.asking import KeptAnswers
    from vtx.tools.fit.fit import fit as search
    from vtx.tools.fit.kinds import fit_kinds
    from vtx.tools.fit.settings import find_settings

    engines, usable = _engines(bundles, settings.loading, settings.profile, settings.max_new_tokens)
    limits = [usable, None if settings.memory is None else int(settings.memory * 1e9)]
    memory = min((limit for limit in limits if limit is not None), default=None)
    reference, candidates = find_settings(engines, memory, cache(questions.sizes))
    identity = {
        "model": reference.on.digest,
        "--max-new-tokens": settings.max_new_tokens,
        "--threads": settings.threads,
        "machine": machine.cpu,
        "set of packages": dict(machine.versions),
    }
    note(
        f"{counted(len(candidates), 'configuration')} of {counted(len(bundles), 'bundle')}, "
        f"{counted(len(questions.digests), 'question')}; compared with {reference.name}"
    )

    def predict(seconds: float) -> None:
        note(f"predicted: at most {duration(seconds)}")

    with (
        ResultJournal(target / "answers.jsonl", identity) as journal,
        bar() as report,
        KeptAnswers(
            questions, journal, settings.max_new_tokens, settings.threads, report, of_right=budget.of_right
        ) as answers,
    ):
        fitted = search(candidates, reference, answers, budget, settings.seed, predict)
        return replace(fitted, kinds=fit_kinds(fitted, answers, settings.seed))


def _report(fitted: Fitted, questions: Questions, target: Path, machine: Machine, *, as_json: bool) -> None:
    """Write the report and its plot, and print it."""
    from vtx.tools.common.files import write_json
    from vtx.tools.fit.report import data_of, draw_front, in_tables, to_dict

    for line in fitted.skipped:
        note(f"skipped {line}")
    report = to_dict(fitted, questions, machine)
    write_json(target / "report.json", report)
    data = data_of(fitted, questions)
    title = f"{data.held_out_questions} questions of {data.source} held out; bars: upper ends; {machine.cpu}"
    try:
        draw_front(fitted, title, target / "front.png")
    except DeviceError as e:
        note(f"plot skipped: {e}; rerun to draw it, answers are kept")
    if as_json:
        say_json(report)
    else:
        say_report(in_tables(fitted, questions, machine))


def _check_cards(bundles: Sequence[Bundle], asked: Questions) -> None:
    """Raise BundleError, RequestError unless each bundle has a card that was made of these questions."""
    from vtx.runtime.bundle.bundle import CARD
    from vtx.runtime.bundle.card import read_card
    from vtx.runtime.units import counted

    for bundle in bundles:
        card = read_card(bundle)
        if card is None:
            raise BundleError(f"{bundle.folder} has no {CARD}; run vtx-fit without --check")
        if card.data.sha256 != asked.sha256:
            raise RequestError(
                f"the questions or images changed since {CARD} of {bundle.folder} was made of "
                f"{counted(card.data.questions, 'question')}, now {len(asked.digests)}; run vtx-fit again"
            )
        note(f"{bundle.folder}: {card.in_words}; made of these questions")


def _engines(
    bundles: Sequence[Bundle], loading: Loading, profile: str | None, max_new_tokens: int
) -> tuple[list[LoadedOn], int | None]:
    """The engines to search on: this machine's, or those of a profile's device, with the memory that it has."""
    from vtx.runtime.host.profiles import load_profile
    from vtx.tools.fit.settings import engines_of, planned_on

    if profile is None:
        return [on for bundle in bundles for on in engines_of(bundle, loading.device, loading.compute)], None
    if loading.compute is not None:
        raise RequestError("--compute has no effect on the estimates of --profile; leave it out")
    device = load_profile(profile)
    return [planned_on(bundle, device, loading.device, max_new_tokens) for bundle in bundles], device.usable_bytes


def _write_card(folder: Path, card: Card, key: SigningKey | None) -> None:
    from vtx.runtime.bundle.bundle import CARD
    from vtx.runtime.bundle.card import write_card

    try:
        write_card(folder, card, key)
    except OSError as e:
        raise ExportError(f"cannot write {folder / CARD} ({e.strerror}); check the disk and run again") from e
    note(f"{folder / CARD} makes it the default of this bundle; remove the file to undo it")
