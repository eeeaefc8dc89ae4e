"""A search as a card for the bundle, as JSON, as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.card import FORMAT, Card, FittedData, Guarantee, KindDepth, Times
from vtx.runtime.strict import json_value
from vtx.runtime.terminal.console import WideTable
from vtx.runtime.units import counted, size
from vtx.tools.bench.machine import Machine
from vtx.tools.common.plots import COLORS, GREY, draw, headline
from vtx.tools.data.bounds import RISK
from vtx.tools.fit.asking import Questions
from vtx.tools.fit.fit import Fitted, spoken
from vtx.tools.fit.settings import Setting


def data_of(fitted: Fitted, questions: Questions) -> FittedData:
    held_out = {questions.images[n] for n in fitted.held_out}
    return FittedData(
        questions.data.source,
        questions.sha256,
        len(questions.digests),
        len(set(questions.images)),
        len(fitted.held_out),
        len(held_out),
    )


def make_card(
    fitted: Fitted, chosen: Setting, questions: Questions, machine: Machine, max_new_tokens: int, threads: int
) -> Card:
    return Card(
        format=FORMAT,
        manifest=chosen.on.digest,
        chosen=fitted.evidence[chosen],
        guarantee=Guarantee(fitted.budget.limit, 1 - RISK, fitted.method, len(fitted.tested), fitted.budget.loss),
        data=data_of(fitted, questions),
        reference=fitted.reference.name,
        max_new_tokens=max_new_tokens,
        threads=threads,
        cpu=machine.cpu,
        system=machine.system,
        versions=machine.versions,
        quiet=fitted.quiet,
        front=tuple(fitted.evidence[setting] for setting in fitted.front),
        planned=planned_for(fitted),
        kinds=fitted.kinds,
    )


def planned_for(fitted: Fitted) -> str | None:
    """The profile whose times were estimated, None if times were measured."""
    planned = fitted.reference.on.planned
    return None if planned is None else planned.profile.name


def to_dict(fitted: Fitted, questions: Questions, machine: Machine) -> dict[str, Any]:
    rungs = [
        {"questions": rung.questions, "settings": {s.name: json_value(at) for s, at in rung.ratings.items()}}
        for rung in fitted.rungs
    ]
    best = None if fitted.chosen is None else fitted.evidence[fitted.chosen]
    return {
        "format": "vtx-fit-1",
        "machine": json_value(machine),
        "budget": json_value(fitted.budget),
        "reference": fitted.reference.name,
        "chosen": json_value(best),
        "verdict": list(fitted.verdict),
        "passed": [setting.name for setting in fitted.passed],
        "evidence": [json_value(evidence) for evidence in fitted.evidence.values()],
        "data": json_value(data_of(fitted, questions)),
        "method": fitted.method,
        "quiet": fitted.quiet,
        "planned": planned_for(fitted),
        "kinds": [json_value(depth) for depth in fitted.kinds],
        "settings": fitted.settings,
        "asked": fitted.asked,
        "skipped": list(fitted.skipped),
        "search": rungs,
    }


def in_tables(fitted: Fitted, questions: Questions, machine: Machine) -> list[str | WideTable]:
    data = data_of(fitted, questions)
    heads = ["", "changed", "upper end alone", "first token, ms", "token, ms", "answer, ms", "memory", "answers kept"]

    heads[1] = "lost" if fitted.budget.of_right else heads[1]

    def shown(times: Times | None) -> str:
        ends = [] if times is None else [times.p50, times.p99, times.p99_upper]
        return "-" if times is None else "; ".join(f"{ms:.1f}" for ms in ends if ms is not None)

    rows = [
        [
            setting.name,
            f"{evidence.changed:.2%}",
            f"{evidence.upper:.2%}",
            shown(evidence.first_token_ms),
            shown(evidence.per_token_ms),
            f"{evidence.answer_ms.p50:.1f}",
            size(evidence.memory),
            "by definition" if setting == fitted.reference else "yes" if setting in fitted.passed else "not shown",
        ]
        for setting, evidence in fitted.evidence.items()
    ]
    loud = "" if fitted.quiet else " THE TIMES DID NOT AGREE when they were measured again: the machine is not quiet."
    how = "Times: median; 99th percentile; its upper end with 95% confidence, where enough were measured."
    if (planned := planned_for(fitted)) is not None:
        how = f"Times, median and 99th percentile, and memory: vtx-plan's estimates for {planned}; none was measured."
    return [
        machine.in_words(),
        f"{counted(data.questions, 'question')} about {counted(data.images, 'image')} of {data.source}; tested on "
        f"{data.held_out_questions} about {data.held_out_images}, none of which the search saw ({fitted.method}). "
        f"{counted(fitted.settings, 'configuration')}, {counted(fitted.asked, 'answer')} computed now.{loud}",
        WideTable("the full model, and those tested in this order until one failed", heads, rows),
        how,
        *([kinds_table(fitted.kinds)] if fitted.kinds else []),
        *fitted.verdict,
    ]


def kinds_table(depths: Sequence[KindDepth]) -> WideTable:
    """K by the kind of answer, which K = card takes."""
    heads = ["kind of answer", "K", "rest", "answers kept", "lower end alone", "questions held out"]
    rows = [
        [
            depth.kind,
            str(depth.k or "none"),
            f"{depth.rest:.0%}" if depth.rest else "-",
            f"{depth.kept:.2%}",
            f"{depth.low:.2%}",
            str(depth.questions),
        ]
        for depth in depths
    ]
    return WideTable("for --k card: the fastest that is shown to keep each kind; none: in full", heads, rows)


def card_tables(card: Card) -> list[str | WideTable]:
    """A card as vtx-doctor prints it."""
    data = card.data
    rows = [
        ["chosen", card.chosen.configuration.name],
        [
            "guarantee",
            f"at most {100 * card.guarantee.limit:.3g}% of the answers {card.guarantee.loss}, compared with "
            f"{card.reference}, with {card.guarantee.confidence:.0%} confidence ({card.guarantee.method})",
        ],
        [
            "held out",
            f"{card.chosen.changed:.2%} changed of {data.held_out_questions} questions about "
            f"{data.held_out_images} images of {data.source} ({data.sha256[:12]})",
        ],
        [
            "times",
            f"{spoken(card.chosen)}, {counted(card.threads, 'thread')}{'' if card.quiet else '; not quiet'}"
            if card.planned is None
            else f"{spoken(card.chosen)}: estimates for {card.planned}, not measured",
        ],
        ["machine", card.cpu],
        *(
            ["alternative", f"{other.bundle}: {other.configuration.name}; {other.changed:.2%} changed; {spoken(other)}"]
            for other in card.front
            if other != card.chosen
        ),
    ]
    parts: list[str | WideTable] = [WideTable("card.json of vtx-fit", ["", ""], rows)]
    return [*parts, *([kinds_table(card.kinds)] if card.kinds else [])]


def draw_front(fitted: Fitted, source: str, path: Path) -> None:
    """Draw changed answers over the time of an answer, and the front. Raises as `draw` does."""

    def fill(figure: Any) -> None:
        axes = figure.subplots()
        searched = {s: at for rung in fitted.rungs for s, at in rung.ratings.items() if s not in fitted.evidence}
        axes.plot(
            [at.answer_ms for at in searched.values()],
            [100 * at.changed for at in searched.values()],
            "o",
            color=GREY,
            alpha=0.4,
            markersize=4,
            label="left out by the search",
        )
        front = [fitted.evidence[setting] for setting in fitted.front]
        axes.step(
            [e.answer_ms.p50 for e in front],
            [100 * e.changed for e in front],
            where="post",
            color=GREY,
            marker="",
            linewidth=1,
            label="Pareto front",
        )
        for number, (setting, evidence) in enumerate(fitted.evidence.items()):
            mark = "*" if setting == fitted.chosen else "s" if setting in fitted.passed else "o"
            value = 100 * evidence.changed
            upper = 100 * evidence.upper
            axes.errorbar(
                evidence.answer_ms.p50,
                value,
                yerr=[[0], [upper - value]],
                fmt=mark,
                capsize=3,
                markersize=12 if mark == "*" else 6,
                color=COLORS[number % len(COLORS)],
                label=setting.name,
            )
        axes.axhline(100 * fitted.budget.limit, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlabel="an answer, ms, median", ylabel="changed answers, %", yscale="symlog")
        axes.set_ylim(0, 100)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center")
        headline(figure, "Changed answers over their time", source)

    draw(path, fill, width=9, height=7)
