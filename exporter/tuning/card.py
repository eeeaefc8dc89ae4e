"""The model card of a tuned checkpoint: base model, training, data and results."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from vtx.exporter.tuning.judge import Accuracy, TuningComparison
from vtx.exporter.tuning.options import TuneOptions

RECORDED = ("vtx-edge", "torch", "transformers", "peft", "accelerate")


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The data and the length of a training."""

    items: int
    rows: int
    data: str
    steps: int


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in RECORDED}


def model_card(base: str, options: TuneOptions, record: TrainingRecord, judged: TuningComparison | None) -> str:
    """Markdown, with the header that model hubs read."""
    d, w, learning = options.depths, options.weights, options.learning
    drawn = f"{d.low} to {d.high}" + (f", {d.target} the most often" if d.target else "")
    layers = "all layers" if learning.layers is None else f"layers {learning.layers[0]} to {learning.layers[1]}"
    trained = f"the weights of {layers}" if learning.full else f"adapters of rank {learning.rank} on {layers}, merged"
    facts = [
        ("base model", base),
        ("trained weights", trained),
        ("K in training", f"{drawn}; {options.full_share:.0%} of the images without withdrawal"),
        ("loss", f"{w.kl:g} KL to the base model + {w.ce:g} cross-entropy + {w.hidden:g} hidden states"),
        ("data", f"{record.items} questions about {record.rows} rows of images, {record.data}"),
        ("steps", f"{record.steps} of {options.schedule.batch} images, learning rate {options.schedule.lr:g}"),
        ("seed", str(options.schedule.seed)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions().items())),
    ]
    lines = [
        "---", f"base_model: {base}", "library_name: transformers", "tags:", "- visual-token-withdrawal", "---", "",
        f"# {base}, tuned for early withdrawal of the image", "",
        "Fine-tuned with `vtx-tune` so that image tokens may leave the decoder before layer K (counted from 1) with",
        "the answers that the base model gives with the image in all layers. Without withdrawal it is used like the",
        "base model, whose license and limits it shares.", "",
        "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), "",
    ]  # fmt: skip
    if judged is None:
        return "\n".join([*lines, "Not judged on held-out data."]) + "\n"
    k = {name: value or "none" for name, value in judged.earliest_k.items()}
    lines += [
        f"On {judged.items} questions held out, the earliest K within {judged.max_drop_points:g} point of the "
        f"base model's accuracy at full depth: {k['before']} before, {k['after']} after.",
        "",
        "| K | right before (95%) | right after (95%) | KL before | KL after |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.k or 'none'} | {_share(p.before)} | {_share(p.after)} | {p.before.kl.mean:.2g} | {p.after.kl.mean:.2g} |"
        for p in judged.curve
    ]
    return "\n".join(lines) + "\n"


def _share(point: Accuracy) -> str:
    share = point.right
    return "-" if share is None else f"{share.share:.1%} ({share.low:.1%}..{share.high:.1%})"
