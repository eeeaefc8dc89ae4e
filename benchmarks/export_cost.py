"""What an export to each form takes: processor time, memory beside its prediction, and the check of its answers.

    python benchmarks/make_checkpoint.py 1b build/llava-1b
    python benchmarks/export_cost.py build/llava-1b --work build --write docs/measurements/results/export-cost.jsonl

Forms are those of `form_speed.py`; with " aware" behind, on 32 questions about drawn scenes. Each export has a process
of its own, and its bundle is removed. Processor time and bytes do not depend on other load; the seconds of the check
do. `--layers` exports the first layers alone, for a shape that is too large: memory depends on the widest layer, and
processor time grows with the layers.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import form_options, parser, report, scratch, write_table

FORMS = ("fp16", "int8", "int8-128", "int4", "int4-32", "int4-32@6.3", "int4-32@6.3 aware", "int4-128")
TABLE = "export-cost"
COLUMNS = (
    "form",
    "memory, MB",
    "predicted",
    "with the check, MB",
    "processor s",
    "of the check",
    "check s",
    "KL",
    "disk, GB",
)


def export_cost(checkpoint: Path, form: str, out: Path) -> dict[str, Any]:
    """Export in this process: bytes of disk, peak memory before and after the check, its prediction, and seconds."""
    from vtx.exporter.bundling.activation_aware import SAMPLES
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.options import ExportOptions, MeasuredArithmetic
    from vtx.exporter.bundling.prepare import plan_export
    from vtx.tools.common.memory import peak
    from vtx.tools.data.items import SCENES, read_data

    aware = read_data(SCENES, None, SAMPLES) if form.endswith(" aware") else None
    forms = form_options(form.removesuffix(" aware"))
    options = ExportOptions(
        str(checkpoint), (), aware=aware, arithmetic=MeasuredArithmetic(), allow_changed_answers=True, **forms
    )
    plan = plan_export(options)
    before = dict[str, float]()

    def watch(phase: str, *_: int) -> None:
        if phase == "arithmetic" and not before:
            before.update(memory=peak() or 0, processor=time.process_time(), clock=time.monotonic())

    bundle = run_export(plan, out, force=False, report=watch)
    processor = time.process_time()
    clock = time.monotonic()
    checked = {
        "processor": processor - before.get("processor", processor),
        "seconds": clock - before.get("clock", clock),
    }
    return {
        "form": form,
        "layers": plan.config.text.layers,
        "disk": sum(record.bytes for record in bundle.manifest.files.values()),
        "memory": before.get("memory") or peak(),
        "predicted": plan.prediction.export_memory,
        "checked_memory": peak(),
        "processor_s": round(processor - checked["processor"], 1),
        "check_processor_s": round(checked["processor"], 1),
        "check_s": round(checked["seconds"], 1),
        "answers": bundle.manifest.record.get("arithmetic", {}).get("f32"),
    }


def cut(checkpoint: Path, layers: int, folder: Path) -> Path:
    """The checkpoint with the first `layers` of its decoder; its weights are linked."""
    shutil.copytree(checkpoint, folder, copy_function=_linked)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"]["num_hidden_layers"] = layers
    path.unlink()
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def _linked(source: str, target: str) -> None:
    Path(target).hardlink_to(Path(source).resolve())


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    error = row["predicted"] / row["memory"] - 1
    answers = row["answers"] or {}
    return [
        row["form"],
        f"{row['memory'] / 1e6:,.0f}",
        f"{error:+.0%}",
        f"{row['checked_memory'] / 1e6:,.0f}",
        f"{row['processor_s']:.0f}",
        f"{row['check_processor_s']:.0f}",
        f"{row['check_s']:.0f}",
        str(answers.get("kl", "")),
        f"{row['disk'] / 1e9:.2f}",
    ]


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("checkpoint", type=Path)
    args.add_argument("--forms", nargs="+", default=list(FORMS))
    args.add_argument("--layers", type=int, help="of the decoder [default: all]")
    args.add_argument("--work", type=Path, help="folder for a bundle at a time [default: here]")
    args.add_argument("--write", type=Path, help="put the table and its rows into these results")
    given = args.parse_args()
    rows = list[dict[str, Any]]()
    with scratch(given.work) as folder:
        checkpoint = given.checkpoint
        if given.layers is not None:
            checkpoint = cut(checkpoint, given.layers, folder / checkpoint.name)
        for form in given.forms:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                rows.append(alone.submit(export_cost, checkpoint, form, folder / "bundle").result())
            shutil.rmtree(folder / "bundle")
    name = f"{TABLE}-{given.checkpoint.name}"
    table = [list(COLUMNS), *map(cells, rows)]
    if given.write is not None:
        caption = f"{given.checkpoint.name}, {rows[0]['layers']} layers; memory before the check of the answers"
        write_table(given.write, name, caption, table, rows)
    report({"rows": rows}, table, given.json)


if __name__ == "__main__":
    main()
