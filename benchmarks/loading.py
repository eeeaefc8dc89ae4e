"""From start to the first word: loading a bundle and its first answer, with memory to spare and as where it is short.

Each figure is the wall time in a fresh process of `vtx.load`, and of one token about a picture after it, which loads
the tower as well; the kinds take turns. With memory to spare the graphs are loaded side by side. The files lie in the
page cache; with `--cold` the system is asked to drop each of them before a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from common import parser, report

from vtx.runtime.units import size
from vtx.tools.bench.series import shown, spread

LOAD = """
import json, resource, sys, time
start = time.perf_counter()
import vtx
from PIL import Image
from vtx.runtime.backends.openvino import backend as openvino
from vtx.runtime.backends.ort import backend as ort

folder, device, kind, threads, compute = sys.argv[1:]
openvino.is_roomy = ort.is_roomy = lambda *_: kind == "roomy"
picture = Image.new("RGB", (336, 336), (200, 30, 30))
begun = time.perf_counter()
model = vtx.load(folder, device=device, threads=int(threads), force=True, compute=compute or None)
loaded = time.perf_counter()
with model.open([picture]) as conversation:
    conversation.ask("How many shapes?", max_new_tokens=1)
end = time.perf_counter()
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"imports": begun - start, "load": loaded - begun, "answer": end - loaded, "peak": peak}))
"""
KINDS = {"short": "memory short", "roomy": "memory to spare"}
PARTS = {"load": "load, s", "answer": "then the first token, s"}


def measured(bundle: Path, device: str, kind: str, threads: int, compute: str, *, cold: bool) -> dict[str, float]:
    """Seconds of each part, and the largest memory in bytes."""
    if cold:
        forget(bundle)
    command = [sys.executable, "-c", LOAD, str(bundle), device, kind, str(threads), compute]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def forget(bundle: Path) -> None:
    """Drop the pages of the bundle's files from the page cache."""
    for path in bundle.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("bundles", type=Path, nargs="+")
    args.add_argument("--devices", default="cpu,openvino")
    args.add_argument("--repeats", type=int, default=5)
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--compute", default="", help="arithmetic on OpenVINO [default: the bundle's]")
    args.add_argument("--cold", action="store_true", help="read the files from the disk each time")
    given = args.parse_args()
    figures, rows = {}, [["bundle", "device", "with", *PARTS.values(), "memory"]]
    for bundle in given.bundles:
        for device in given.devices.split(","):
            runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for turn in range(given.repeats + 1):
                for kind in KINDS if turn % 2 else reversed(KINDS):
                    compute = given.compute if device == "openvino" else ""
                    runs[kind].append(measured(bundle, device, kind, given.threads, compute, cold=given.cold))
            for kind, words in KINDS.items():
                found = runs[kind][1:]  # the first round warms the caches
                series = {part: spread([run[part] for run in found]) for part in PARTS}
                figures[f"{bundle.name} on {device}, {words}"] = series
                most = size(int(max(run["peak"] for run in found)))
                rows.append([bundle.name, device, words, *(shown(series[part], 2) for part in PARTS), most])
    report({"seconds": figures}, rows, given.json)


if __name__ == "__main__":
    main()
