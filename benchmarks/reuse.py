"""Time to first token of the first, the second and later questions on one image, for every prebuilt K.

Each round opens the image afresh at each K in turn. The first question pays for the vision tower and for the
image's part of the caches; the second, at the same K, reuses both. `changed` is a second question at another K.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import export, parser, report, scratch, shown, spread

import vtx
from vtx.runtime.golden import golden_image

QUESTIONS = ("What is in the picture?", "How many shapes are there?", "Where is the red circle?")


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--bundle", type=Path, help="any bundle [default: the demo at K = 8, 16 in fp16]")
    args.add_argument("--rounds", type=int, default=15)
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = args.parse_args()
    with scratch(None) as folder:
        if given.bundle:
            bundle = given.bundle
        else:
            from vtx.exporter.export import demo_checkpoint

            bundle = export(demo_checkpoint(), folder / "demo", (8, 16), "fp16")
        model = vtx.load(bundle, threads=given.threads)
        times = rounds(model, given.rounds)
    figures: dict[str, Any] = {"model": model.manifest.model.name, "precision": model.manifest.precision, "k": {}}
    rows = [["K", "first, ms", "second, ms", "third, ms", "second at another K, ms", "first / second"]]
    for k, found in times.items():
        series = {name: spread(values[1:]) for name, values in found.items()}
        ratio = series["first"]["median"] / series["second"]["median"]
        figures["k"][str(k)] = {**series, "first_to_second": ratio}
        moments = ("first", "second", "third", "changed")
        cells = [shown(series[name]) if name in series else "-" for name in moments]
        rows.append([str(k or "none"), *cells, f"{ratio:.1f}"])
    report(figures, rows, given.json)


def rounds(model: vtx.Model, count: int) -> dict[int | None, dict[str, list[float]]]:
    """Milliseconds to the first token by K and by the question's place; the first round warms up."""
    ks: list[int | None] = [None, *model.manifest.variants]
    found: dict[int | None, dict[str, list[float]]] = {k: defaultdict(list) for k in ks}
    image, options = golden_image(), vtx.Options(max_new_tokens=1)
    for _ in range(count + 1):
        for k in ks:
            with model.open(image) as conversation:
                for name, question in zip(("first", "second", "third"), QUESTIONS, strict=True):
                    stats = conversation.ask(question, k, options).stats
                    assert stats.reused_image == (name != "first")
                    found[k][name].append(stats.timings_ms["first_token"])
            for other in ks:
                if other != k:
                    with model.open(image) as conversation:
                        conversation.ask(QUESTIONS[0], other, options)
                        stats = conversation.ask(QUESTIONS[1], k, options).stats
                        found[k]["changed"].append(stats.timings_ms["first_token"])
    return found


if __name__ == "__main__":
    main()
