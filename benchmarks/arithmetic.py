"""Which arithmetic keeps a model's answers, at each precision of its weights: what an export judges, on more questions.

Each bundle answers the same drawn scenes in float32, bfloat16 and, of integer weights, int8 arithmetic on OpenVINO. An
answer is kept if its first tokens are those of float32; the interval is over scenes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import export, parser, report, scratch
from vtx.tools.fit.arithmetic import DEVICE, LEAST_KEPT, TOKENS, candidates, measure_arithmetic

from vtx.exporter.bundling.options import DEMO
from vtx.runtime.bundle.bundle import Bundle
from vtx.tools.data.items import Data, scene_items

PER_SCENE = 4  # questions


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--model", type=Path, default=Path(DEMO), help="a checkpoint [default: the demo]")
    args.add_argument("--k", type=int, default=16, help="the K that answers")
    args.add_argument("--precision", nargs="+", default=["fp32", "int8", "int4"])
    args.add_argument("--samples", type=int, default=400)
    args.add_argument("--scratch", type=Path, help="folder for the bundles [default: here]")
    given = args.parse_args()
    data = Data("scenes", scene_items(given.samples // PER_SCENE, PER_SCENE))
    figures: dict[str, Any] = {}
    rows = [["weights", "arithmetic", "kept", "95% interval, %", "passes"]]
    with scratch(given.scratch) as folder:
        for precision in given.precision:
            bundle = export(given.model, folder / precision, (given.k,), precision)
            kinds = candidates(Bundle.open(bundle).manifest, always=True)
            measure_arithmetic(bundle, kinds, data, lambda *_: None)
            manifest = Bundle.open(bundle).manifest
            figures[precision] = found = manifest.record["arithmetic"]
            for kind in kinds:
                if obstacle := found[kind].get("obstacle"):
                    rows.append([precision, kind, obstacle, "-", "-"])
                    continue
                low, high = (f"{100 * found[kind][end]:.1f}" for end in ("low", "high"))
                used = "yes" if kind in manifest.arithmetic else "no"
                rows.append([precision, kind, f"{found[kind]['kept']} of {len(data.items)}", f"{low} to {high}", used])
            print("; ".join(" ".join(row) for row in rows[1:]), flush=True)
    about = {"model": given.model.name, "device": DEVICE, "tokens": TOKENS, "least": LEAST_KEPT, "k": given.k}
    report({**about, "kept": figures}, rows, given.json)


if __name__ == "__main__":
    main()
