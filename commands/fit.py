"""vtx-fit: the configuration that keeps a budget. It parses, calls and prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    from vtx.tools.fit.asking import Questions
    from vtx.tools.fit.settings import LoadedOn


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
    option("--questions", str, "Your questions, in the format of vtx-calibrate, answers optional; scenes: drawn "
           "scenes, for the demo.", required=True, metavar="FILE"),
    "images",
    option("--samples", int, "Maximum number of questions, sampled from the file [default: all]."),
    option("--keep", "98%", "Minimum share of answers equal to the full model's.", callback=_share, metavar="SHARE"),
    option("--accuracy-drop", float, "Instead of --keep, for questions with answers: limit on the share that turns "
           "from right to wrong.", metavar="POINTS"),
    option("--first-token", float, "Limit on the 99th percentile of the time to first token.", metavar="MS"),
    option("--per-token", float, "Limit on the 99th percentile of the time per output token, averaged within an "
           "answer.", metavar="MS"),
    option("--memory", float, "Memory limit.", metavar="GB"),
    option("--profile", str, "Choose for this device, by vtx-plan's estimates of time and memory; --device names its "
           "engine.", metavar="NAME"),
    option("--max-new-tokens", 32, "Maximum tokens per answer."),
    option("--seed", 0, "Seed of the split into search and held-out questions."),
    "device", "compute", "threads",
    option("--sign", Path, "Sign the card with this private Ed25519 key (PEM); required for signed bundles.",
           metavar="KEY"),
    option("--no-card", bool, "Do not write a card."),
    option("--check", bool, "Only check the bundle's existing card on these questions."),
    option("--out", Path, "Output directory for answers, report and plot [default: vtx-fit-BUNDLE]."),
    "report",
)  # fmt: skip
def fit(
    bundles: tuple[Path, ...], questions: str, images: Path | None, samples: int | None, keep: float,
    accuracy_drop: float | None, first_token: float | None, per_token: float | None, memory: float | None,
    profile: str | None, max_new_tokens: int, seed: int, loading: Loading, sign: Path | None, no_card: bool,
    check: bool, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest configuration of a model's bundles within a budget, and write it into a card.

    Half of the images are used to search over precision (the bundles), arithmetic, K, reductions, tiles and pixels.
    The other half tests the result. The card makes it the default of vtx-run, vtx-chat, vtx-serve and the APIs. An
    interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SIGNATURE, SigningKey
    from vtx.runtime.host.machine import cores
    from vtx.runtime.units import counted, duration
    from vtx.tools.bench.machine import describe
    from vtx.tools.common.files import write_json
    from vtx.tools.data.items import SCENES, read_data
    from vtx.tools.data.journal import ResultJournal
    from vtx.tools.fit.asking import KeptAnswers, Questions, split
    from vtx.tools.fit.fit import check_enough
    from vtx.tools.fit.fit import fit as search
    from vtx.tools.fit.kinds import fit_kinds
    from vtx.tools.fit.report import data_of, draw_front, in_tables, make_card, to_dict
    from vtx.tools.fit.search import Budget
    from vtx.tools.fit.settings import find_settings

    if accuracy_drop is not None and given("keep"):
        raise RequestError("--keep and --accuracy-drop are mutually exclusive; give one of them")
    least = keep if accuracy_drop is None else 1 - accuracy_drop / 100
    budget = Budget(least, first_token, per_token, accuracy_drop is not None)
    key = None if sign is None else SigningKey.load(sign)
    opened = [Bundle.open(folder) for folder in bundles]
    if samples is None and questions == SCENES:
        raise RequestError("--questions scenes draws as many scenes as it is told; give a number, e.g. --samples 1200")
    asked = Questions.of(read_data(questions, images, 1 << 30 if samples is None else samples, seed))
    if check:
        _check_cards(opened, asked)
        return
    signed = [bundle for bundle in opened if bundle.files.exists("vtx.json" + SIGNATURE)]
    if signed and key is None and not no_card:
        raise RequestError(
            f"{signed[0].folder} is signed, and devices that ask for its signature refuse a card without one; give the "
            "key with --sign KEY, or leave the bundle as it is with --no-card"
        )
    for line in asked.data.skipped:
        note(f"skipped {line}")
    check_enough(asked, split(asked, seed)[1], budget)
    threads = cores() if loading.threads is None else loading.threads
    engines, usable = _engines(opened, loading, profile, max_new_tokens)
    limits = [usable, None if memory is None else int(memory * 1e9)]
    most = min((limit for limit in limits if limit is not None), default=None)
    reference, settings = find_settings(engines, most, cache(asked.sizes))
    target = out or Path(f"vtx-fit-{opened[0].folder.name}")
    machine = describe()
    identity = {
        "model": reference.on.digest, "--max-new-tokens": max_new_tokens, "--threads": threads, "machine": machine.cpu,
        "set of packages": dict(machine.versions),
    }  # fmt: skip
    note(
        f"{counted(len(settings), 'configuration')} of {counted(len(opened), 'bundle')}, "
        f"{counted(len(asked.digests), 'question')}; compared with {reference.name}"
    )
    with (
        ResultJournal(target / "answers.jsonl", identity) as journal,
        bar() as report,
        KeptAnswers(asked, journal, max_new_tokens, threads, report, of_right=budget.of_right) as answers,
    ):
        fitted = search(
            settings, reference, answers, budget, seed, lambda seconds: note(f"predicted: at most {duration(seconds)}")
        )
        fitted = replace(fitted, kinds=fit_kinds(fitted, answers, seed))
    for line in fitted.skipped:
        note(f"skipped {line}")
    found = to_dict(fitted, asked, machine)
    write_json(target / "report.json", found)
    data = data_of(fitted, asked)
    title = f"{data.held_out_questions} questions of {data.source} held out; bars: upper ends; {machine.cpu}"
    try:
        draw_front(fitted, title, target / "front.png")
    except DeviceError as e:
        note(f"plot skipped: {e}; rerun to draw it, answers are kept")
    say_json(found) if as_json else say_report(in_tables(fitted, asked, machine))
    if fitted.chosen is None:
        raise RequestError("; ".join(fitted.verdict[:2]))
    if not no_card:
        card = make_card(fitted, fitted.chosen, asked, machine, max_new_tokens, threads)
        _write_card(fitted.chosen.on.bundle.folder, card, key)
    note(f"answers, report and plot are in {target}")


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
