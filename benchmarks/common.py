"""What the benchmarks share: the machine in words, spread of a series, tables, JSON, and large random bundles."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

BLOCK = 1 << 22
NAMES = {
    "vision.": "model.vision_tower.",
    "projector.": "model.multi_modal_projector.",
    "text.": "model.language_model.",
    "head.": "lm_head.",
}
TESTED = ("onnxruntime", "numpy", "tokenizers", "pillow")


def parser(doc: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return found


def machine() -> dict[str, Any]:
    """The machine as a class, what it was doing besides, and the versions that matter."""
    flags, models = set[str](), list[str]()
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                flags |= set(value.split())
            elif key.strip() == "model name":
                models.append(value.strip())
    kinds = [name for name, flag in (("AVX2", "avx2"), ("AVX512", "avx512f"), ("AMX", "amx_tile")) if flag in flags]
    return {
        "cpu": f"{os.cpu_count()} cores, {models[0] if models else platform.machine()} ({', '.join(kinds)})",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in TESTED},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and count of a series."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "n": len(values)}


def shown(series: dict[str, float], digits: int = 2) -> str:
    return f"{series['median']:.{digits}f} ({series['q1']:.{digits}f} to {series['q3']:.{digits}f})"


def report(figures: dict[str, Any], rows: Sequence[Sequence[str]], target: Path | None) -> None:
    """Print the machine and a Markdown table whose first row is its head; write `figures` where asked."""
    about = machine()
    busy = " THE MACHINE IS NOT QUIET." if about["load_before"] > 0.5 + about.get("own_load", 0) else ""
    print(f"{about['cpu']}; onnxruntime {about['onnxruntime']}, Python {about['python']}.{busy}\n")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if not number:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    if target:
        target.write_text(json.dumps({"machine": about, **figures}, indent=1) + "\n", encoding="utf-8")


@contextmanager
def scratch(where: Path | None) -> Iterator[Path]:
    """A folder for large files, gone afterwards; on a disk, since memory is what is measured."""
    with TemporaryDirectory(prefix="vtx-bench-", dir=where or ".") as folder:
        yield Path(folder)


def random_checkpoint(folder: Path, *, layers: int, hidden: int, heads: int, ffn: int, vocab: int | None) -> Path:
    """The demo checkpoint with a larger text model of random float32 weights, written a block at a time."""
    from vtx.exporter.export import demo_checkpoint
    from vtx.exporter.graphs.decoder import decoder_tensors
    from vtx.exporter.graphs.vision import vision_tensors
    from vtx.exporter.hf.config import ModelConfig
    from vtx.runtime.safetensors import layout

    shutil.copytree(demo_checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config["text_config"]
    text |= {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "torch_dtype": "float32"}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 2048}
    text |= {"vocab_size": vocab} if vocab else {}
    path.write_text(json.dumps(config), encoding="utf-8")
    model, rng = ModelConfig.from_hf(config), np.random.default_rng(0)
    weights = folder / "model.safetensors"
    needed = [*vision_tensors(model), *decoder_tensors(model.text)]
    header, _ = layout(weights, [(_hub_name(name), "F32", shape) for name, shape in needed])
    with weights.open("wb") as out:
        out.write(header)
        for name, shape in needed:
            left, scale = int(np.prod(shape)), np.float32(0.02)
            while left:
                block = rng.standard_normal(min(left, BLOCK), dtype=np.float32) * scale
                out.write((block + ("norm" in name)).astype("<f4").tobytes())
                left -= len(block)
    return folder


def _hub_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise ValueError(name)


def export(checkpoint: Path, out: Path, ks: Sequence[int], precision: str = "fp32") -> Path:
    from vtx.exporter.export import ExportOptions, plan_export, run_export

    plan = plan_export(ExportOptions(str(checkpoint), tuple(ks), precision, None))
    run_export(plan, out, force=False, report=lambda *_: None)
    return out
