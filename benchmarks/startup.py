"""Start-up: `import vtx`, `vtx-run --help`, start to ready and to an answer, beside `import onnxruntime` alone.

Each figure is the wall time of a fresh Python process, the kinds taking turns; `ready` loads the bundle, `answer` is
`vtx-run` on a picture of 336 x 336 pixels and a short question. The time that an empty Python takes is given, and not
subtracted. Modules are compiled to bytecode beforehand, as pip does when it installs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import export, parser, report, scratch

from vtx.runtime.backends.ort.library import SILENCE
from vtx.tools.bench.series import shown, spread

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "numpy")


def kinds(bundle: Path, image: Path) -> dict[str, list[str]]:
    python = [sys.executable, "-c"]
    run = "from vtx.cli import run; run()"
    return {
        "python alone": [*python, "pass"],
        "import vtx": [*python, "import vtx"],
        "vtx-run --help": [str(Path(sys.executable).parent / "vtx-run"), "--help"],
        "import onnxruntime": [*python, "import onnxruntime"],
        "start to ready": [*python, f"import vtx; vtx.load({str(bundle)!r}, device='cpu')"],
        "start to answer": [*python, run, "--bundle", str(bundle), "--device", "cpu", str(image), "How many shapes?"],
    }


def compiling(folder: Path) -> dict[str, str]:
    """An environment in which modules are compiled once, into `folder`, and onnxruntime reports nothing, as in vtx."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"PYTHONPYCACHEPREFIX": str(folder.resolve()), SILENCE: "1"}


def draw_image(path: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (336, 336), (200, 30, 30)).save(path)
    return path


def seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def loaded_by_import() -> list[str]:
    """Which of the heavy modules `import vtx` has loaded."""
    code = f"import sys, vtx; print(*[m for m in {HEAVY} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--bundle", type=Path, help="which to load [default: the demo, exported at K = 16 in fp16]")
    args.add_argument("--repeats", type=int, default=15)
    given = args.parse_args()
    with scratch(None) as folder:
        if given.bundle:
            bundle = given.bundle
        else:
            from vtx.exporter.bundling.prepare import demo_checkpoint

            bundle = export(demo_checkpoint(), folder / "demo", (16,), "fp16")
        commands, environment = kinds(bundle, draw_image(folder / "image.png")), compiling(folder / "bytecode")
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(given.repeats + 1):
            for name, command in commands.items():
                times[name].append(seconds(command, environment))
    series = {name: spread(found[1:]) for name, found in times.items()}  # without the round that warms and compiles
    against = series["import onnxruntime"].median
    figures: dict[str, Any] = {"seconds": series, "loaded_by_import_vtx": loaded_by_import()}
    rows = [["", "seconds", "of import onnxruntime", "least"]]
    for name, found in series.items():
        rows.append([name, shown(found, 3), f"{found.median / against:.2f}", f"{min(times[name]):.3f}"])
    print(f"loaded by `import vtx`: {', '.join(figures['loaded_by_import_vtx']) or 'none of ' + ', '.join(HEAVY)}")
    report(figures, rows, given.json)


if __name__ == "__main__":
    main()
