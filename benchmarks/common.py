"""What the benchmarks share: options, reports, large random bundles; the spread is vtx-bench's."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from vtx.runtime.bundle.safetensors import layout
from vtx.runtime.host.machine import cores
from vtx.runtime.strict import json_value
from vtx.tools.bench.machine import describe
from vtx.tools.common.files import write_json

BLOCK = 1 << 22
BUSY_BEFORE = psutil.cpu_percent(0.5)  # percent of the cores that other work keeps busy
NAMES = {
    "vision.": "model.vision_tower.",
    "projector.": "model.multi_modal_projector.",
    "text.": "model.language_model.",
    "head.": "lm_head.",
}


def parser(doc: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return found


def bundle_parser(doc: str) -> argparse.ArgumentParser:
    """As `parser`, with a bundle, the device and the threads that run it, and a seed."""
    args = parser(doc)
    args.add_argument("bundle", type=Path)
    args.add_argument("--device", default="auto")
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--seed", type=int, default=0)
    return args


def report(figures: dict[str, Any], rows: Sequence[Sequence[str]], target: Path | None) -> None:
    """Print the machine and a Markdown table whose first row is its head; write `figures` where asked."""
    about = describe()
    print(f"{about.in_words()}\n\n{markdown(rows)}")
    if target:
        write_json(target, {"machine": {**json_value(about), "busy_before": BUSY_BEFORE}, **json_value(figures)})


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def replace_tables(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Put lines into a file of results in place of those of the same tables; others stay."""
    tables = {line["table"] for line in lines}
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    others = [line for line in map(json.loads, known) if line["table"] not in tables]
    file.write_text("".join(f"{json.dumps(json_value(line))}\n" for line in (*others, *lines)), encoding="utf-8")


def write_table(
    file: Path, name: str, caption: str, table: Sequence[Sequence[str]], rows: Sequence[dict[str, Any]]
) -> None:
    """Put a table whose first row is its head, and the figures that it is of, into a file of results."""
    head, *cells = table
    about = {"columns": head, "align": ["---", *["---:"] * (len(head) - 1)], "caption": caption}
    lines = [{"table": name, **about}, *({"table": name, "row": row} for row in cells)]
    replace_tables(file, [*lines, *({"table": f"{name}-raw", "row": row} for row in rows)])


@contextmanager
def scratch(where: Path | None) -> Iterator[Path]:
    """A folder for large files, gone afterwards; on a disk, since memory is what is measured."""
    with TemporaryDirectory(prefix="vtx-bench-", dir=where or ".") as folder:
        yield Path(folder)


def random_checkpoint(folder: Path, *, layers: int, hidden: int, heads: int, ffn: int, vocab: int | None) -> Path:
    """The demo checkpoint with a larger text model of random float32 weights, written a block at a time."""
    from vtx.exporter.bundling.prepare import demo_checkpoint
    from vtx.exporter.checkpoint.families.registry import read_config
    from vtx.exporter.graphs.vision import vision_tensors

    shutil.copytree(demo_checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config["text_config"]
    text |= {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "torch_dtype": "float32"}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 2048}
    text |= {"vocab_size": vocab} if vocab else {}
    path.write_text(json.dumps(config), encoding="utf-8")
    model = read_config(config)
    needed = [(_hub_name(name), shape) for name, shape in (*vision_tensors(model), *model.text.tensors())]
    write_random(folder / "model.safetensors", needed, "F32", lambda name, _: (0.02, float("norm" in name)))
    return folder


def of_kept_size(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Deviation and mean of a tensor: norms near 0, matrices so that their products keep the size of what goes in."""
    return 0.1 if "norm" in name else shape[-1] ** -0.5, 0.0


def write_random(
    file: Path,
    needed: Sequence[tuple[str, tuple[int, ...]]],
    kind: str = "F16",
    deviation_and_mean: Callable[[str, tuple[int, ...]], tuple[float, float]] = of_kept_size,
) -> None:
    """A safetensors file of random weights, F16 or F32, a block at a time."""
    rng = np.random.default_rng(0)
    stored = {"F16": "<f2", "F32": "<f4"}[kind]
    header, _ = layout(file, [(name, kind, shape) for name, shape in needed])
    with file.open("wb") as out:
        out.write(header)
        for name, shape in needed:
            left = int(np.prod(shape))
            deviation, mean = deviation_and_mean(name, shape)
            while left:
                block = rng.standard_normal(min(left, BLOCK), dtype=np.float32)
                out.write((block * np.float32(deviation) + np.float32(mean)).astype(stored).tobytes())
                left -= len(block)


def _hub_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise ValueError(name)


def form_options(form: str) -> dict[str, Any]:
    """The export's options of a form such as fp16, int8-128 or int4-32@6.3."""
    stored, _, bits = form.partition("@")
    precision, _, block = stored.partition("-")
    options: dict[str, Any] = {"precision": precision}
    if block:
        options[f"{precision}_block"] = int(block)
    if bits:
        options["bits"] = float(bits)
    return options


def export(checkpoint: Path, out: Path, ks: Sequence[int], precision: str = "fp32") -> Path:
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    plan = plan_export(ExportOptions(str(checkpoint), tuple(ks), precision, None))
    run_export(plan, out, force=False, report=lambda *_: None)
    return out
