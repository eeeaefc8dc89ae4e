"""Ask libvtx and the Python runtime the same questions about the same pictures, and count where they differ.

    python scripts/cpp_pairs.py --pictures 14

Per bundle, device and K (none, each fixed one, auto) every picture is asked a first, a second and a third question, and
so are pairs of pictures; token ids, text, KV slots, image tokens kept by each layer, their patches and the gates' odds
must be equal. The bundles are the demo, and random LLaVA models whose images have 576 tokens, multi-head and
grouped-query, with gates and reductions. One line per bundle and device says how many answers were equal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.bundles import export_with  # noqa: E402 - from the path above
from tests.support.cabi import Loaded  # noqa: E402
from tests.support.tiny import Tiny, make, random_image  # noqa: E402

from vtx.exporter.bundling.options import ExportOptions  # noqa: E402
from vtx.exporter.bundling.prepare import demo_checkpoint  # noqa: E402
from vtx.runtime.api.load import load  # noqa: E402
from vtx.runtime.api.model import Model  # noqa: E402
from vtx.runtime.bundle.safetensors import write_safetensors  # noqa: E402

QUESTIONS = ("How many shapes are there?", "Where is the red circle, and what is beside it?", "Is it large?")
DEVICES = ("cpu", "openvino")
TOKENS = 6
REDUCTIONS = ("fastv:k=2,ratio=0.5", "cls:keep=0.25+mustdrop:tau=off,key=0.1,layers=2/4", "cdpruner:keep=24")
UNEQUAL = ("timings_ms", "question", "image", "bundle")


def gates(path: Path, hidden: int, before: int) -> Path:
    """A gate before layer `before`, of random weights."""
    random = np.random.default_rng(168)
    first = random.standard_normal((24, 2 * hidden)).astype(np.float32) / math.sqrt(2 * hidden)
    second = random.standard_normal((2, 24)).astype(np.float32)
    name = f"gate.{before - 2}"
    write_safetensors(path, {f"{name}.fc1.weight": first, f"{name}.fc2.weight": second}, None)
    return path


def bundles(folder: Path) -> Iterator[tuple[str, Path]]:
    """The bundles, each exported when it is reached."""
    dialects = ("ort", "plain")
    demo = gates(folder / "demo-gates.safetensors", 128, 16)
    options = ExportOptions(str(demo_checkpoint()), (16,), "fp16", dialects=dialects, gates=demo)
    yield "demo fp16", export_with(options, folder / "demo").folder
    for heads, precisions in ((4, ("fp32", "fp16", "int8")), (2, ("bf16", "int4"))):
        tiny = Tiny(kv_heads=heads, image=336, context=1536)
        checkpoint = make(folder / f"checkpoint-{heads}", tiny)
        made = gates(folder / f"gates-{heads}.safetensors", 64, 3)
        for precision in precisions:
            options = ExportOptions(
                str(checkpoint), (3, 5), precision, dialects=dialects, reductions=REDUCTIONS, gates=made
            )
            name = f"{'multi-head' if heads == 4 else 'grouped-query'} {precision}"
            yield name, export_with(options, folder / name.replace(" ", "-")).folder


def settings(model: Model) -> Iterator[tuple[str, str]]:
    """K and reductions: each K without reductions, then each reduction at every K in turn."""
    ks = ["none", *map(str, model.manifest.variants), *(["auto"] if model.manifest.gates else [])]
    yield from ((k, "none") for k in ks)
    yield from ((ks[number % len(ks)], spec) for number, spec in enumerate(model.manifest.reductions))


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the facts that differ between two runs."""
    found: dict[str, Any] = json.loads(json.dumps(answer))
    for key in UNEQUAL:
        found.pop(key, None)
    for decision in found.get("gate", []):
        decision.pop("ms")
        decision["probability"] = round(decision["probability"], 4)
    return found


def compare(model: Model, other: Loaded, shown: list[Path], k: str, reduce: str) -> Iterator[str]:
    """For each question the first fact that differs, or an empty string."""
    found = other.ask(shown, QUESTIONS, k=k.encode(), reduce=reduce.encode(), max_new_tokens=TOKENS)
    with model.open(shown) as conversation:
        for question, answer in zip(QUESTIONS, found, strict=True):
            wanted = conversation.ask(question, int(k) if k.isdigit() else k, reduce=reduce, max_new_tokens=TOKENS)
            want, got = facts(wanted.to_dict()), facts(answer)
            wrong = [key for key in {*want, *got} if want.get(key) != got.get(key)]
            yield f"{wrong[0]}: {got.get(wrong[0])}, Python has {want.get(wrong[0])}" if wrong else ""


def pictures(folder: Path, count: int) -> list[list[Path]]:
    """Single pictures of many shapes, and one pair."""
    random, paths = np.random.default_rng(5), list[Path]()
    for number in range(count):
        width, height = (int(side) for side in random.integers(40, 400, 2))
        image = random_image(number, (width, height)) if number % 2 else None
        noise = random.integers(0, 256, (height, width, 3), np.uint8)
        path = folder / f"{number}.png"
        (image or Image.fromarray(noise)).save(path)
        paths.append(path)
    return [*([path] for path in paths), paths[:2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=4, help="single pictures per setting, in addition to a pair")
    parser.add_argument("--devices", default=",".join(DEVICES))
    given = parser.parse_args()
    asked = equal = 0
    with TemporaryDirectory(prefix="vtx-pairs-", dir=".") as name:
        folder = Path(name).absolute()
        shown = pictures(folder, given.pictures)
        for title, bundle in bundles(folder):
            for device in given.devices.split(","):
                model, other = load(bundle, device=device, threads=1), Loaded(bundle, device)
                before = asked, equal
                for k, reduce in settings(model):
                    for images in shown:
                        for number, problem in enumerate(compare(model, other, images, k, reduce)):
                            asked, equal = asked + 1, equal + (not problem)
                            if problem:
                                print(f"{title}, {device}, K = {k}, {reduce}, question {number + 1}: {problem:.300}")
                model.close()
                other.close()
                print(f"{title} on {device}: {equal - before[1]} of {asked - before[0]} answers equal", flush=True)
    print(f"{equal} of {asked} answers equal")
    sys.exit(equal != asked)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
