"""First token and a token's time of each form of weights, on onnxruntime and OpenVINO, in turn.

    python benchmarks/make_checkpoint.py 1b build/llava-1b
    python benchmarks/form_speed.py build/llava-1b --work build/forms-1b

A form is a precision, behind "-" the weights that share a scale, and behind "@" the mean bits of mixed weights. Its
bundle is exported to --work unless it is there. Every round loads each bundle on each engine, asks once to warm up,
and then --asks times in new conversations about the same picture, whose encoding is not counted; every second round
goes backwards. One bundle is in memory at a time.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import form_options, parser, report, write_table
from PIL import Image

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.host.machine import cores
from vtx.tools.bench.series import shown, spread

FORMS = ("fp16", "bf16", "int8", "int8-128", "int4", "int4-32", "int4-32@6.3", "int4-128")
DEVICES = ("cpu", "openvino")
QUESTION = "What is written on the sign beside the door, and who is named below it?"
Place = tuple[str, str]  # form and engine


def bundle_of(checkpoint: Path, form: str, work: Path) -> Path:
    """The bundle of a form in `work`, exported now unless it is there."""
    out = work / form
    if not (out / "vtx.json").exists():
        options = ExportOptions(str(checkpoint), (), dialects=("ort", "plain"), **form_options(form))
        run_export(plan_export(options), out, force=False, report=lambda *_: None)
    return out


def asked(bundle: Path, device: str, compute: str, threads: int, tokens: int, asks: int) -> list[dict[str, float]]:
    """Milliseconds to the first token and for each further one, `asks` times after a question that warms up."""
    pixels = np.random.default_rng(0).integers(0, 256, (336, 336, 3), np.uint8)
    picture = Image.fromarray(pixels)
    with load(bundle, device=device, compute=compute, threads=threads, force=True) as model:
        times = list[dict[str, float]]()
        for _ in range(1 + asks):
            with model.open(picture) as conversation:
                times.append(conversation.ask(QUESTION, "none", max_new_tokens=tokens).stats.timings_ms)
    return [{"first": one["prefill"], "token": one["decode_per_token"]} for one in times[1:]]


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("checkpoint", type=Path)
    args.add_argument("--work", type=Path, required=True, help="folder of the bundles, about 1.5 GB each at 1b")
    args.add_argument("--forms", nargs="+", default=list(FORMS))
    args.add_argument("--devices", nargs="+", default=list(DEVICES))
    args.add_argument("--compute", default="f32", help="arithmetic of the engines [%(default)s]")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--asks", type=int, default=2, help="of a bundle in a round [%(default)s]")
    args.add_argument("--tokens", type=int, default=17)
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--write", type=Path, help="put the table and its rows into these results")
    given = args.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    bundles = {form: bundle_of(given.checkpoint, form, given.work) for form in given.forms}
    places = [(form, device) for form in given.forms for device in given.devices]
    times = defaultdict[Place, list[dict[str, float]]](list)
    for number in range(given.rounds):
        for form, device in places[:: -1 if number % 2 else 1]:
            times[form, device] += asked(bundles[form], device, given.compute, given.threads, given.tokens, given.asks)
    table = [["form", "engine", "first token, ms", "token, ms"]]
    rows = list[dict[str, Any]]()
    for form, device in places:
        phases = {name: spread([one[name] for one in times[form, device]]) for name in ("first", "token")}
        table.append([form, device, *map(shown, phases.values())])
        rows.append({"form": form, "device": device, **phases, "rounds": times[form, device]})
    if given.write is not None:
        caption = f"{given.checkpoint.name}, {given.threads} threads, {given.compute}; median (quartiles)"
        write_table(given.write, f"form-speed-{given.checkpoint.name}", caption, table, rows)
    about = {"checkpoint": given.checkpoint.name, "threads": given.threads, "compute": given.compute}
    report({**about, "rows": rows}, table, given.json)


if __name__ == "__main__":
    main()
