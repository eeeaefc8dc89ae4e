"""Resident memory of one prebuilt K against four: every weight should count once.

Random weights of a text model of hidden 2048 are written, exported twice, and each bundle is loaded and asked
in a fresh process. `resident` is RSS, `own` USS (what would come free if the process ended), `shared_out` PSS,
`private` what is no file's, `peak` the largest RSS so far.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from common import export, parser, random_checkpoint, report, scratch

from vtx.runtime.backends.ort.library import import_onnxruntime
from vtx.tools.bench.series import shown, spread
from vtx.tools.common.memory import peak

VARIANTS = {"one": (4,), "four": (2, 3, 4, 6)}
MIB = 1 << 20


def measure(bundle: str, threads: int) -> dict[str, Any]:
    """Memory of this process in bytes: at start, after the load, after an answer at the first K."""
    import vtx

    def taken() -> dict[str, int]:
        info = psutil.Process().memory_full_info()
        own = {"resident": info.rss, "own": info.uss, "shared_out": info.pss, "private": info.rss - info.shared}
        return {**own, "peak": peak() or 0}

    import_onnxruntime()  # part of the base
    base = taken()
    model = vtx.load(bundle, device="cpu", threads=threads)
    loaded = taken()
    model.ask("how many shapes are there?", None, vtx.Options(max_new_tokens=8, ignore_eos=True))
    answered = taken()
    model.ask("how many shapes are there?", None, vtx.Options(max_new_tokens=8, ignore_eos=True))
    return {"base": base, "loaded": loaded, "answered": answered, "again": taken()}


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--layers", type=int, default=6)
    args.add_argument("--hidden", type=int, default=2048)
    args.add_argument("--heads", type=int, default=16)
    args.add_argument("--ffn", type=int, default=5504)
    args.add_argument("--vocab", type=int, default=32064)
    args.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    args.add_argument("--repeats", type=int, default=3)
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--scratch", type=Path, help="folder for the weights, about twice their size [default: here]")
    args.add_argument("--measure", metavar="BUNDLE", help="measure one bundle in this process and print JSON")
    given = args.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.threads)))
        return
    with scratch(given.scratch) as folder:
        sizes = {name: getattr(given, name) for name in ("layers", "hidden", "heads", "ffn", "vocab")}
        checkpoint = random_checkpoint(folder / "checkpoint", **sizes)
        bundles = {n: export(checkpoint, folder / n, ks, given.precision) for n, ks in VARIANTS.items()}
        weights = sum(path.stat().st_size for path in (bundles["one"] / "weights").iterdir())
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in bundles}
        for _ in range(given.repeats):
            for name, bundle in bundles.items():
                command = [sys.executable, __file__, "--measure", str(bundle), "--threads", str(given.threads)]
                runs[name].append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    moments, kinds = ("base", "loaded", "answered", "again"), ("resident", "own", "shared_out", "private", "peak")
    figures: dict[str, Any] = {"sizes": sizes, "precision": given.precision, "weights_bytes": weights}
    rows = [["moment", "memory", "one K, MiB", "four K, MiB", "four / one"]]
    for moment in moments:
        for kind in kinds:
            series = {n: spread([run[moment][kind] / MIB for run in found]) for n, found in runs.items()}
            ratio = series["four"].median / series["one"].median
            figures[f"{moment}.{kind}"] = {**series, "ratio": ratio}
            rows.append([moment, kind, shown(series["one"], 1), shown(series["four"], 1), f"{ratio:.4f}"])
    print(f"weights on disk: {weights / MIB:.1f} MiB ({given.precision})")
    report(figures, rows, given.json)


if __name__ == "__main__":
    main()
