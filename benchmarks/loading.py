"""Loading a bundle: its graphs side by side against one after another, on the engines named.

Each figure is the wall time of a backend's construction in a fresh process, files in the page cache, the kinds taking
turns. For the file cache to be cold, drop it before each run: `--cold` asks the system to, file by file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import parser, report

from vtx.exporter.bench.series import shown, spread

LOAD = """
import sys, time
from vtx.runtime.backends import loading
from vtx.runtime.backends.openvino import backend as openvino
from vtx.runtime.backends.ort import backend as ort
from vtx.runtime.bundle.bundle import Bundle

folder, device, kind, threads = sys.argv[1:]
engine = openvino if device == "openvino" else ort
if kind == "one after another":
    engine.load_threads = lambda *_: 1
start = time.perf_counter()
bundle = Bundle.open(folder)
(openvino.OpenvinoBackend if device == "openvino" else ort.OrtBackend)(bundle, int(threads))
print(time.perf_counter() - start)
"""
KINDS = ("one after another", "side by side")


def seconds(bundle: Path, device: str, kind: str, threads: int, *, cold: bool) -> float:
    if cold:
        forget(bundle)
    command = [sys.executable, "-c", LOAD, str(bundle), device, kind, str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


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
    args.add_argument("--cold", action="store_true", help="read the files from the disk each time")
    given = args.parse_args()
    figures, rows = {}, [["bundle", "device", *(f"{kind}, s" for kind in KINDS), "second / first"]]
    for bundle in given.bundles:
        for device in given.devices.split(","):
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(given.repeats + 1):
                for kind in KINDS if turn % 2 else reversed(KINDS):
                    times[kind].append(seconds(bundle, device, kind, given.threads, cold=given.cold))
            series = {kind: spread(found[1:]) for kind, found in times.items()}  # the first round warms the caches
            ratio = spread([after / before for before, after in zip(*(times[kind][1:] for kind in KINDS), strict=True)])
            figures[f"{bundle.name} on {device}"] = series
            rows.append([bundle.name, device, *(shown(series[kind], 2) for kind in KINDS), shown(ratio, 2)])
    report({"seconds": figures}, rows, given.json)


if __name__ == "__main__":
    main()
