"""vtx-tune: fine-tuning for an earlier K. It parses, calls and prints."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtx.commands.shared.options import PRECISION, need_exporter, option, options
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, table

if TYPE_CHECKING:
    from vtx_tune.options import Dtype


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The options of vtx-tune."""

    data: str
    k: str
    model: str
    images: Path | None
    items: int
    held_out: int
    full_share: float
    reduce: str
    gates: bool
    judged: str | None
    kl_weight: float
    ce_weight: float
    hidden_weight: float
    rank: int
    alpha: int
    layers: str | None
    full: bool
    qlora: bool
    lr: float
    epochs: float
    steps: int | None
    batch: int
    questions: int
    max_tokens: int
    max_new_tokens: int
    dtype: Dtype
    checkpointing: bool
    save_every: int
    seed: int
    out: Path | None
    as_json: bool


@command(
    epilog="vtx-tune --k 8\n"
    "vtx-tune questions.jsonl --images photos --model llava-hf/llava-1.5-7b-hf --k 4-12 --items 10000\n"
    "vtx-tune questions.jsonl --model ./my-llava --k 8 --full --layers 1-7 --lr 1e-5\n"
    'accelerate launch --num_processes 8 "$(which vtx-tune)" questions.jsonl --model ./my-llava --k 8\n'
    "vtx-export --model vtx-tuned-my-llava/merged --k 8"
)
@options(
    "data",
    option("--k", str, "K during training: around N, or between LOW and HIGH.", required=True, metavar="N|LOW-HIGH"),
    "model",
    "images",
    "items",
    option("--held-out", 250, "Items to evaluate on, with other images; 0: none."),
    option(
        "--full-share",
        0.2,
        "Share of images that all layers see; 1: the same training without withdrawal, as a control.",
    ),
    option("--reduce", "none", "Token reduction for the student's other images, e.g. divprune.", metavar="SPEC"),
    option("--gates", bool, "Train gates halfway through, which choose K from then on, and again at the end."),
    option(
        "--judge-precision judged",
        PRECISION,
        "Evaluate with the engines of temporary bundles of this precision [default: float32 on the CPU, slower].",
    ),
    option("--kl-weight", 1.0, "Loss weight of the KL divergence to the teacher."),
    option("--ce-weight", 1.0, "Loss weight of the answers in DATA."),
    option("--hidden-weight", 0.0, "Loss weight of the final hidden states."),
    option("--rank", 16, "LoRA rank."),
    option("--alpha", 32, "LoRA alpha; the scale is alpha / rank."),
    option("--layers", str, "Layers to train [default: all].", metavar="N|FIRST-LAST"),
    option("--full", bool, "Train all weights of these layers, without adapters."),
    option("--qlora", bool, "QLoRA: keep the base weights in 4 bits; needs bitsandbytes."),
    option("--lr", 2e-4, "Learning rate."),
    option("--epochs", 1.0),
    option("--steps", int, "Training steps, instead of --epochs.", metavar="N"),
    option("--batch", 8, "Rows per step, over all processes."),
    option("--questions", 8, "Questions per row, about one image."),
    option("--max-tokens", 2048, "Maximum tokens per row."),
    option("--max-new-tokens", 64, "Maximum tokens per answer."),
    option(
        "--dtype",
        "auto",
        "Training arithmetic; auto: bf16 on a GPU, else fp32.",
        type=click.Choice(["auto", "fp32", "bf16"]),
    ),
    option(
        "--gradient-checkpointing/--no-gradient-checkpointing checkpointing",
        True,
        "Recompute layers in the backward pass to save memory.",
    ),
    option("--save-every", 50, "Steps between checkpoints."),
    option("--seed", 0, "Seed of sampling, order, K and adapters."),
    option("--out", Path, "Output directory [default: vtx-tuned-MODEL]."),
    "report",
    record=TuneSettings,
)
def tune(settings: TuneSettings) -> None:
    """Fine-tune a model for an earlier K, distilled from the model itself.

    DATA has the format of vtx-calibrate; answers are optional. An interrupted run resumes where it stopped. The
    result is a checkpoint, its adapters, and a report of every K before and after.
    """
    end_on_sigterm()
    need_exporter()
    from vtx_tune.options import Depths, Learning, LossWeights, Packing, Schedule, TuneOptions
    from vtx_tune.tune import is_main_process, open_workspace, run

    s = settings
    layers = Learning.parse_layers(s.layers) if s.layers else None
    options = TuneOptions(
        Depths.parse(s.k),
        s.model,
        s.data,
        s.images,
        s.items,
        s.held_out,
        s.full_share,
        LossWeights(s.kl_weight, s.ce_weight, s.hidden_weight),
        Learning(s.rank, s.alpha, layers, s.full, s.qlora),
        Schedule(s.lr, s.epochs, s.batch, s.save_every, s.seed, s.steps),
        Packing(s.questions, s.max_tokens, s.max_new_tokens),
        s.dtype,
        s.checkpointing,
        s.judged,
        s.reduce,
        s.gates,
    )
    target = settings.out or Path(f"vtx-tuned-{Path(settings.model).expanduser().absolute().name}")
    main = is_main_process()

    def silent(*_: object) -> None:
        """Report nothing, on processes other than the main one."""

    say = note if main else silent
    work = open_workspace(options, target, say)
    with bar() if main else nullcontext(silent) as progress:
        report = run(work, options, target, progress, say)
    if not main:
        sys.stderr.flush()
        # torch keeps the threads of its process groups. One that lets go of a tensor while Python shuts down aborts.
        os._exit(0)
    if settings.as_json:
        say_json(report)
        return
    _show(report)
    click.echo(f"the checkpoint is {target / 'merged'}, the report {target / 'report.json'}")


def _show(report: dict[str, Any]) -> None:
    judged = report["judged"]
    if judged is None:
        click.echo("no items were held out to evaluate on; measure the checkpoint with vtx-calibrate")
        return

    def cells(point: dict[str, Any]) -> list[str]:
        share = point["right"]
        kl = point["kl"]
        right = "-" if share is None else f"{share['share']:.1%} ({share['low']:.0%}..{share['high']:.0%})"
        return [right, f"{kl['mean']:.2g}"]

    def points(gain: dict[str, Any] | None) -> str:
        if gain is None:
            return "-"
        return "{mean:+.1f} ({low:+.1f}..{high:+.1f})".format(**{name: 100 * end for name, end in gain.items()})

    rows = [
        [str(p["k"] or "none"), *(cell for name in ("before", "after") for cell in cells(p[name])), points(p["gained"])]
        for p in judged["curve"]
    ]
    heads = ["K", "right before", "KL", "right after", "KL", "points gained"]
    table(f"{judged['items']} items held out", heads, rows)
    if judged["gates"]:
        gated = [
            [
                f"{g['threshold']:g}",
                f"{g['full_layers']:.1f}",
                f"{g['right']['share']:.1%}",
                points(g["gained"]),
                g["fixed"],
                points(g["ahead"]),
            ]
            for g in judged["gates"]
        ]
        heads = ["threshold", "full layers", "right", "points gained", "best fixed K", "points ahead of it"]
        table("gates: beside the untuned model at full depth, and the tuned one at a fixed K", heads, gated)
    for name, k in judged["earliest_k"].items():
        point = f"{judged['max_drop_points']:g} point"
        click.echo(f"{name}: earliest K within {point} of the untuned model's full depth: {k or 'none'}")
    earliest = judged["earliest_k_by_own_full_depth"]["after"]
    click.echo(f"after, within {judged['max_drop_points']:g} point of its own full depth: {earliest or 'none'}")
