"""libvtx beside the Python runtime: load, first token, each further token, whole command, and resident memory.

    python benchmarks/cpp.py                      # the demo in fp16 on ONNX Runtime
    python benchmarks/cpp.py --device openvino --bundle build/llava-1b-int8 --tokens 64
    python benchmarks/cpp.py --device openvino --compute int8 --bundle build/llava-1b-int8 --repeats 5

Each round runs a fresh process of each, who goes first in turns, over the same picture, questions and K. Both
must give the same token ids, or it ends. `load`, `first` and `token` are what the runtimes say; `command` is the time
from the start of the process to its last answer; `resident` is its memory while it waits then, and `overhead MB` the
same without the weights' files and the KV slots of the answer. OpenVINO GenAI's wheel has no headers of its C++ API, so
that library is measured through Python, by `benchmarks/peers`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import export, parser, report, scratch

from vtx.tools.bench.series import shown, spread

ROOT = Path(__file__).parents[1]
QUESTIONS = ("How many shapes are there?", "Where is the star?")
KINDS = ("libvtx", "python")
PYTHON = """
import json, sys, vtx
bundle, picture, device, compute, threads, k, tokens, *questions = sys.argv[1:]
model = vtx.load(bundle, device=device, compute=compute or None, threads=int(threads))
with model.open(picture) as conversation:
    for question in questions:
        answer = conversation.ask(question, k if k == "none" else int(k), max_new_tokens=int(tokens), ignore_eos=True)
        print(json.dumps(answer.to_dict()), flush=True)
sys.stdin.read()
"""


def commands(given: Any, bundle: Path, picture: Path) -> dict[str, list[str]]:
    said = [str(given.threads), given.k, str(given.tokens)]
    tool = [
        str(given.build / "vtx-cpp-run"),
        "--bundle",
        str(bundle),
        str(picture),
        *QUESTIONS,
        "--json",
        "--ignore-eos",
    ]
    options = [word for pair in zip(("--threads", "--k", "--max-new-tokens"), said, strict=True) for word in pair]
    python = [sys.executable, "-c", PYTHON, str(bundle), str(picture), given.device, given.compute, *said, *QUESTIONS]
    computing = ["--device", given.device, *(["--compute", given.compute] if given.compute else [])]
    return {"libvtx": [*tool, *computing, *options, "--wait"], "python": python}


def environment() -> dict[str, str]:
    """The engines inside the wheels, for libvtx."""
    import onnxruntime

    found = {"VTX_ONNXRUNTIME": str(Path(onnxruntime.__file__).parent / "capi")}
    try:
        import openvino
    except ImportError:
        return {**os.environ, **found}
    return {**os.environ, **found, "VTX_OPENVINO": str(Path(openvino.__file__).parent / "libs")}


def run(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """The answers of one process, its wall time, and its memory after the last answer."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    answers = [json.loads(process.stdout.readline()) for _ in QUESTIONS]
    answered = time.perf_counter() - start
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    process.communicate("")
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {process.returncode}")
    return {"answers": answers, "command": answered, "resident": resident}


def figures_of(found: dict[str, Any], weights: int) -> dict[str, float]:
    first, last = found["answers"][0], found["answers"][-1]
    times = first["timings_ms"]
    return {
        "load ms": times["load"],
        "first ms": times["first_token"],
        "token ms": times["decode_per_token"],
        "command ms": 1000 * found["command"],
        "resident MB": found["resident"] / 1e6,
        "overhead MB": (found["resident"] - weights - last["kv_bytes"]) / 1e6,
    }


def weights_of(bundle: Path) -> int:
    return sum(path.stat().st_size for path in (bundle / "weights").iterdir())


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--bundle", type=Path, help="which to ask [default: the demo, exported at K = 16 in fp16]")
    args.add_argument("--build", type=Path, default=ROOT / "build/cpp", help="what make cpp built")
    args.add_argument("--device", default="cpu", choices=["cpu", "openvino"])
    args.add_argument("--compute", default="", help="f32, bf16 or int8 [default: the device's]")
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--k", default="16")
    args.add_argument("--tokens", type=int, default=32)
    args.add_argument("--repeats", type=int, default=15)
    given = args.parse_args()
    from PIL import Image

    with scratch(None) as folder:
        bundle, picture = given.bundle, folder / "picture.png"
        Image.effect_noise((336, 336), 60).convert("RGB").save(picture)
        if bundle is None:
            from vtx.exporter.bundling.prepare import demo_checkpoint

            bundle = export(demo_checkpoint(), folder / "demo", (16,), "fp16")
        both, variables, weights = commands(given, bundle, picture), environment(), weights_of(bundle)
        series: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
        for number in range(given.repeats + 1):
            found = {kind: run(both[kind], variables) for kind in (KINDS if number % 2 else KINDS[::-1])}
            ids = [[answer["token_ids"] for answer in found[kind]["answers"]] for kind in KINDS]
            if ids[0] != ids[1]:
                raise SystemExit(f"libvtx and Python give other tokens: {ids}")
            for kind in KINDS if number else ():  # the first round warms the file cache
                for name, value in figures_of(found[kind], weights).items():
                    series[kind].setdefault(name, []).append(value)
    rows = [["", *KINDS, "libvtx / python"]]
    summary: dict[str, Any] = {}
    for name in series["libvtx"]:
        pair = [series[kind][name] for kind in KINDS]
        ratio = spread([one / other for one, other in zip(*pair, strict=True)])
        rows.append([name, *(shown(spread(values), 2) for values in pair), shown(ratio, 2)])
        summary[name] = {kind: spread(series[kind][name]) for kind in KINDS} | {"ratio": ratio}
    engine = f"{given.device} {given.compute}".strip()
    print(f"{bundle.name} on {engine}, K = {given.k}, {given.threads} threads, {given.repeats} rounds")
    report({"figures": summary}, rows, given.json)


if __name__ == "__main__":
    main()
