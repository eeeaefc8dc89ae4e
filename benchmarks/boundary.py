"""What a stage boundary costs: the same decoder layers in one graph and in two, in turn, in one process.

Random float32 weights of hidden 2048 are written and exported uncut and cut at one K. Both bundles answer the same
text prompt without withdrawal, so every row goes through every layer in both. Rounds alternate; a ratio is taken
within each round, so that what else the machine does falls on both sides.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import export, parser, random_checkpoint, report, scratch, shown, spread

from vtx.runtime.model import Model, load
from vtx.runtime.policy import Full
from vtx.runtime.session import Prompt, Session


class Runner:
    """One bundle's session, its prompt, and a clock."""

    def __init__(self, model: Model, rows: int) -> None:
        self._session = Session(model.backend, model.manifest)
        ids = np.random.default_rng(0).integers(5, model.manifest.model.vocab, rows)
        self._prompt = Prompt(ids, np.zeros(rows, bool))

    def prefill(self) -> float:
        start = time.perf_counter()
        self._session.prefill(self._prompt, Full())
        return 1000 * (time.perf_counter() - start)

    def decode(self, tokens: int) -> float:
        start = time.perf_counter()
        for token in range(5, 5 + tokens):
            self._session.decode(token)
        return 1000 * (time.perf_counter() - start) / tokens


def rounds(uncut: Runner, cut: Runner, count: int, tokens: int) -> dict[str, list[tuple[float, float]]]:
    """(uncut, cut) times of each round; who goes first changes from round to round."""
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for number in range(count + 1):
        order = (uncut, cut) if number % 2 else (cut, uncut)
        prefill = {id(runner): runner.prefill() for runner in order}
        decode: dict[int, list[float]] = {id(runner): [] for runner in order}
        for turn in range(4):
            for runner in order if turn % 2 else order[::-1]:
                decode[id(runner)].append(runner.decode(tokens))
        if number:  # the first round warms up
            found["prefill"].append((prefill[id(uncut)], prefill[id(cut)]))
            found["decode"].append((sum(decode[id(uncut)]) / 4, sum(decode[id(cut)]) / 4))
    return found


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--layers", type=int, default=8)
    args.add_argument("--hidden", type=int, default=2048)
    args.add_argument("--heads", type=int, default=16)
    args.add_argument("--ffn", type=int, default=5504)
    args.add_argument("--k", type=int, default=5, help="where the second bundle is cut")
    args.add_argument("--rows", type=int, default=640, help="rows of the prompt")
    args.add_argument("--tokens", type=int, default=4, help="tokens decoded at a stretch; four stretches a round")
    args.add_argument("--rounds", type=int, default=15)
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--scratch", type=Path, help="folder for the weights, about 1.6 GB [default: here]")
    given = args.parse_args()
    sizes = {name: getattr(given, name) for name in ("layers", "hidden", "heads", "ffn")}
    with scratch(given.scratch) as folder:
        checkpoint = random_checkpoint(folder / "checkpoint", **sizes, vocab=None)
        bundles = [export(checkpoint, folder / name, ks) for name, ks in (("uncut", ()), ("cut", (given.k,)))]
        uncut, cut = (Runner(load(bundle, threads=given.threads), given.rows) for bundle in bundles)
        found = rounds(uncut, cut, given.rounds, given.tokens)
    figures: dict[str, Any] = {"sizes": sizes, "k": given.k, "rows": given.rows, "threads": given.threads}
    rows = [["", "uncut, ms", "cut, ms", "cut / uncut", "least / least"]]
    for what, pairs in found.items():
        one, two = [a for a, _ in pairs], [b for _, b in pairs]
        ratio, least = spread([b / a for a, b in pairs]), min(two) / min(one)
        figures[what] = {"uncut_ms": spread(one), "cut_ms": spread(two), "ratio": ratio, "least_ratio": least}
        rows.append([what, shown(spread(one)), shown(spread(two)), shown(ratio, 4), f"{least:.4f}"])
    report(figures, rows, given.json)


if __name__ == "__main__":
    main()
