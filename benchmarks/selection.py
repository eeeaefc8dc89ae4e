"""What choosing image tokens costs before the decoder, in libvtx and in Python: one image, question after question.

    python benchmarks/selection.py --tokens 576,2928

Random tokens and questions, the same for both, who must keep or merge the same tokens. Each round runs a fresh image
in each runtime, who goes first in turns; the processor's time of the first question, which works out what an image's
questions share, and of the later ones. Python on one thread, as libvtx. `make cpp` before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when numpy is imported

import numpy as np
from common import parser, report

from vtx.runtime.bundle.spec.names import CLIP_PATCHES, RECEIVED
from vtx.runtime.policies import PromptText, parse
from vtx.runtime.vision.tokens import ImageTokens, Patches, TowerTokens
from vtx.tools.bench.series import shown, spread

PROBE = Path(__file__).parents[1] / "build/cpp/vtx-cpp-probe"
CLIP = 768
QUESTIONS = 3
SPECS = ("cdpruner:keep={keep}", "cdpruner:keep={keep},text=tower", "dart:keep={keep},k=0", "divprune:keep={keep}",
         "random:keep={keep}", "visionzip:dominant={keep},contextual=20", "hiprune:keep={keep}")  # fmt: skip
PER_VIEW = ("cdpruner", "hiprune", "visionzip")
NAMES = {spec.partition(":")[0] for spec in SPECS}
Found = list[tuple[list[int], float]]  # what is kept and the milliseconds, question after question
MERGING = "visionzip"  # of the tower's tokens, by keys of so many numbers
HEAD = 64


def drawn(seed: int, tokens: int, hidden: int) -> list[Any]:
    """Tokens, their patches in CLIP's space, and of each question its mean embedding and CLIP's; all float32."""
    random = np.random.default_rng(seed)
    shapes = [(tokens, hidden), (tokens, CLIP), *[(1, hidden), (1, CLIP)] * QUESTIONS]
    return [random.standard_normal(shape, np.float32) + np.float32(0.5) for shape in shapes]


def views_of(tokens: int) -> Any:
    """The view of each token of LLaVA-NeXT's largest image; None for an image in one piece."""
    return np.array([*np.repeat(range(5), 576), *[-1] * 48]) if tokens == 5 * 576 + 48 else None


def tower_of(rows: Any) -> TowerTokens:
    """Tokens of the tower: of each view 576 and the class token, or all and one more."""
    views = 1 if views_of(len(rows)) is None else 5
    count = (576 if views > 1 else len(rows)) + 1
    keys = np.resize(rows, (views, count, HEAD))
    return TowerTokens(keys, keys, np.resize(rows[:, HEAD], (views, count)), columns=2)


def libvtx(spec: str, arrays: list[Any]) -> Found:
    if spec.startswith(MERGING):
        tower = tower_of(arrays[0])
        sizes = map(str, (*tower.keys.shape, tower.columns))
        given = tower.keys.tobytes() + tower.attention.tobytes()
        done = subprocess.run([PROBE, "merge", spec, *sizes], input=given, capture_output=True, check=True)
        found = json.loads(done.stdout)
        return [(found["sources"], found["ms"])]
    views = views_of(len(arrays[0]))
    tiled = [] if views is None else [views]
    sizes = (*arrays[0].shape, CLIP, QUESTIONS, *(["tiled"] if tiled else []))
    stdin = b"".join(array.tobytes() for array in [*arrays[:2], *tiled, *arrays[2:]])
    done = subprocess.run([PROBE, "select", spec, *map(str, sizes)], input=stdin, capture_output=True, check=True)
    return [(line["kept"], line["ms"]) for line in map(json.loads, done.stdout.splitlines())]


def python(spec: str, arrays: list[Any]) -> Found:
    rows, patches, *questions = arrays
    signals = {CLIP_PATCHES: patches, RECEIVED: patches[:, 1:3]}
    where = Patches(np.arange(len(rows)), np.zeros(len(rows), bool), signals, views_of(len(rows)))
    image = ImageTokens(rows, where)
    image = replace(image, key=hashlib.sha256(rows.tobytes()).hexdigest())
    [method] = parse(spec)
    entry = method.entry()
    found = list[tuple[list[int], float]]()
    if method.name == MERGING:
        image = replace(image, tower=tower_of(rows))
        start = time.process_time()
        merged = entry.merge(image)
        return [(merged.sources.tolist(), 1000 * (time.process_time() - start))]
    for mean, embedding in zip(questions[::2], questions[1::2], strict=True):
        start = time.process_time()
        kept = entry.select(image, PromptText(np.zeros(1, np.int64), mean, np.ones(1, bool), embedding))
        found.append((kept.tolist(), 1000 * (time.process_time() - start)))
    return found


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument(
        "--tokens",
        default="576,2928",
        help="of an image; 2928: 5 views, 48 newlines [default: %(default)s]",
    )
    args.add_argument("--hidden", type=int, default=4096)
    args.add_argument("--share", type=float, default=2 / 9, help="of them that is kept [default: 128 of 576]")
    args.add_argument("--rounds", type=int, default=5)
    given = args.parse_args()
    sides = {"libvtx": libvtx, "Python": python}
    table = [["tokens", "", "runtime", "first question, ms", "later ones, ms"]]
    figures = []
    for tokens in map(int, given.tokens.split(",")):
        views = 1 if views_of(tokens) is None else 5  # of each view as many, as CDPruner counts
        kept = {name: round(given.share * tokens / (views if name in PER_VIEW else 1)) for name in NAMES}
        for spec in (spec.format(keep=kept[spec.partition(":")[0]]) for spec in SPECS):
            times: dict[str, list[list[float]]] = {name: [] for name in sides}
            for number in range(given.rounds):
                arrays = drawn(number, tokens, given.hidden)
                chosen = []
                for name in sorted(sides, reverse=number % 2 == 1):
                    found = sides[name](spec, arrays)
                    chosen.append([which for which, _ in found])
                    times[name].append([ms for _, ms in found])
                if chosen[0] != chosen[1]:
                    raise SystemExit(f"{spec}: the runtimes keep other tokens of image {number}")
            for name, rounds in times.items():
                first = spread([ms[0] for ms in rounds])
                later = spread([t for ms in rounds for t in ms[1:] or ms])
                table.append([f"{tokens:,}", spec, name, shown(first), shown(later)])
                figures.append({"tokens": tokens, "spec": spec, "runtime": name, "first_ms": first, "later_ms": later})
    report({"hidden": given.hidden, "rounds": given.rounds, "selection": figures}, table, given.json)


if __name__ == "__main__":
    main()
