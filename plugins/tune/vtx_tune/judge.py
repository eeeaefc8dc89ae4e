"""Before and after, at every K, on the same items held out: vtx-calibrate's measurements of both checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.calibration.calibrate import CalibrationOptions, calibrate
from vtx.exporter.calibration.source import OpenedModel, open_source
from vtx.runtime.bundle.bundle import MANIFEST
from vtx.runtime.units import Progress
from vtx.tools.calibration.choosing import Choice, Choosing, choose_by_accuracy
from vtx.tools.calibration.gates import THRESHOLDS, HeldOut, best_fixed
from vtx.tools.calibration.report import CalibrationReport, Measurement, images_of, make_report, write_report
from vtx.tools.common.loading import Loading
from vtx.tools.data.intervals import MeanInterval, ShareInterval, grouped_share, mean_intervals
from vtx.tools.data.items import Data, Item

MAX_DROP = 1.0  # percentage points
Gating = Callable[[OpenedModel, Sequence[Item], Path], tuple[HeldOut, list[Item]]]


@dataclass(frozen=True, slots=True)
class Judging:
    """With a `precision` both models are exported to it, cut at every K, and measured by their engines.

    `gating` trains the tuned model's gates, which are judged on the same items.
    """

    max_new_tokens: int
    precision: str | None = None
    gating: Gating | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAnswers:
    """The tuned model under its gates at one `threshold`: the mean number of layers that see the image, right answers.

    `gained`: how many more of the answers are right than of the untuned model without withdrawal; `ahead`: than of the
    tuned model at `fixed`, the best fixed K, or two in turn, at no more layers. Both are paired by question.
    """

    threshold: float
    full_layers: float
    right: ShareInterval
    gained: MeanInterval
    fixed: str
    ahead: MeanInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningComparison:
    """A model before and after its tuning.

    `earliest_k`: the first K within `max_drop_points` of the untuned model's accuracy at full depth, chosen by `rules`.
    `curve`: for each K (None: no withdrawal) `right`, the share of right answers, the mean `kl` in nats, and `gained`,
    how many more of the answers are right after than before, with its interval paired by question. `gates`: the tuned
    model's, at each threshold, if gates were trained.
    """

    items: int
    max_drop_points: float
    earliest_k: Mapping[str, int | None]
    earliest_k_by_own_full_depth: Mapping[str, int | None]
    rules: Mapping[str, Choice]
    full_depth_lost_points: float | None
    curve: tuple[Mapping[str, Any], ...]
    gates: tuple[GatedAnswers, ...] = ()


def judge(
    before: OpenedModel,
    merged: Path,
    items: Sequence[Item],
    judging: Judging,
    out: Path,
    report: Progress,
) -> TuningComparison:
    """Curves of both over K, the earliest K within a point of full depth, and the accuracy lost at full depth.

    An answer that the data do not give is the untuned model's own at full depth; so the accuracy of both models is the
    share of right answers if the data have them, else of answers equal to that model's.
    """
    options = CalibrationOptions(k_from=2, max_new_tokens=judging.max_new_tokens)
    answered = Data("items held out", tuple(items))
    models = {"before": before, "after": open_source(str(merged))}
    precision = judging.precision
    if precision is not None:
        models = {name: deployed(model, precision, out / f".{name}", report) for name, model in models.items()}
    if any(item.answer is None for item in items):
        teacher = calibrate(models["before"], answered, options, out / "own", _phase(report, "teacher"))
        texts = {digest: result.answer for digest, result in zip(teacher.items, teacher.results, strict=True)}
        filled = [item if item.answer else replace(item, answer=texts.get(item.digest())) for item in items]
        answered = Data("items held out", tuple(filled))
    reports = dict[str, CalibrationReport]()
    measured = dict[str, Measurement]()
    for name, source in models.items():
        measured[name] = calibrate(source, answered, options, out / name, _phase(report, name))
        reports[name] = make_report(source.calibrated, answered.source, measured[name], Choosing(max_drop=MAX_DROP))
        write_report(reports[name], out / name)
    comparison = compared(reports["before"], reports["after"])
    if judging.gating is not None:
        held, questions = judging.gating(models["after"], answered.items, out / "after" / "gates")
        comparison = replace(comparison, gates=gated(held, questions, measured["before"], measured["after"]))
    for name in models if precision is not None else ():  # until here an interrupted judgement finds its bundles
        shutil.rmtree(out / f".{name}")
    return comparison


def deployed(model: OpenedModel, precision: str, folder: Path, report: Progress) -> OpenedModel:
    """A temporary bundle of a checkpoint, cut at every K, on its engine."""
    assert isinstance(model.origin, Plan), "only checkpoints are tuned"
    if not (folder / MANIFEST).exists():
        every = tuple(range(2, model.config.text.layers + 1))
        options = replace(model.origin.options, ks=every, precision=precision, head_precision=None)
        run_export(plan_export(options), folder, force=True, report=report)
    return open_source("", folder, engine=Loading())


def _phase(report: Progress, name: str) -> Progress:
    return lambda phase, done, total: report(name if phase == "measuring" else phase, done, total)


def compared(before: CalibrationReport, after: CalibrationReport) -> TuningComparison:
    """The two curves side by side, and for each the earliest K within a point of the untuned model's full depth."""
    full = before.curve[0]
    now = after.curve[0].right
    pairs = zip(before.curve, after.curve, gained(before, after), strict=True)
    # By vtx-calibrate's rule, from the accuracy of the untuned model at full depth.
    folders = {"before": before, "after": after}
    earliest = {name: choose_by_accuracy((full, *report.curve[1:]), MAX_DROP) for name, report in folders.items()}
    return TuningComparison(
        items=before.data.items,
        max_drop_points=MAX_DROP,
        earliest_k={name: choice.k for name, choice in earliest.items()},
        earliest_k_by_own_full_depth={"before": before.k, "after": after.k},
        rules=earliest,
        full_depth_lost_points=100 * (full.right.share - now.share) if full.right and now else None,
        curve=tuple(
            {
                "k": b.k,
                "full_layers": b.full_layers,
                "before": {"right": b.right, "kl": b.kl},
                "after": {"right": a.right, "kl": a.kl},
                "gained": gain,
            }
            for b, a, gain in pairs
        ),
    )


def gained(before: CalibrationReport, after: CalibrationReport) -> list[MeanInterval | None]:
    """For each K the share of right answers gained, over the same questions, those about an image together."""
    pairs = [
        (b.right, a.right, image)
        for b, a, image in zip(before.samples, after.samples, images_of(before.samples), strict=True)
        if b.right is not None and a.right is not None
    ]
    if not pairs:
        return [None] * len(before.curve)
    changes = np.array([np.subtract(a, b, dtype=float) for b, a, _ in pairs])
    return [*mean_intervals(changes, [image for *_, image in pairs])]


def gated(held: HeldOut, items: Sequence[Item], before: Measurement, after: Measurement) -> tuple[GatedAnswers, ...]:
    """The gates of the tuned model at each threshold, on those of `items` whose right answers are known."""
    full = {digest: r.right[0] for digest, r in zip(before.items, before.results, strict=True) if r.right is not None}
    tuned = {digest: r.right for digest, r in zip(after.items, after.results, strict=True) if r.right is not None}
    pairs = [(n, d) for n, d in enumerate(item.digest() for item in items) if d in full and d in tuned]
    if not pairs:
        return ()
    at = [n for n, _ in pairs]
    images = [held.images[n] for n, _ in pairs]
    right = np.array([[*tuned[digest][1:], tuned[digest][0]] for _, digest in pairs])
    remaining = replace(
        held, odds=held.odds[at], same=right, right=held.right[at], tokens=held.tokens[at], images=images
    )
    untuned = np.array([full[digest] for _, digest in pairs], float)
    answers = list[GatedAnswers]()
    for threshold in THRESHOLDS:
        columns = remaining.exits(threshold)
        layers = float(remaining.full_layers(columns).mean())
        hits = right[np.arange(len(at)), columns].astype(float)
        fixed, rival = best_fixed(remaining, layers)
        gain, lead = mean_intervals(np.column_stack([hits - untuned, hits - rival]), images)
        answers.append(
            GatedAnswers(
                threshold=threshold,
                full_layers=layers,
                right=grouped_share(hits.astype(bool).tolist(), images),
                gained=gain,
                fixed=fixed,
                ahead=lead,
            )
        )
    return tuple(answers)
