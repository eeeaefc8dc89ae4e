"""What a stage boundary costs: the same decoder layers in one graph and in two, in turn, in one process.

Random float32 weights of hidden 2048 are written and exported uncut and cut at one K. Both bundles answer the same
text prompt without withdrawal, so every row goes through every layer in both. Each round runs them in turn, one
first and then the other, and gives one ratio; so what else the machine does falls on both sides. On a machine that
is not quiet, take --threads 1 and the ratio of processor times, which waiting for a core does not lengthen.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import export, parser, random_checkpoint, report, scratch
from numpy.typing import NDArray

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.methods.withdraw import Full
from vtx.runtime.session.session import Prompt, Session
from vtx.tools.bench.series import shown, spread

Times = NDArray[np.float64]


class Runner:
    """One bundle's session, its prompt, and two clocks."""

    def __init__(self, model: Model, rows: int, tokens: int) -> None:
        self._session = Session(model.backend, model.manifest)
        ids = np.random.default_rng(0).integers(5, model.manifest.model.vocab, rows)
        self._prompt = Prompt(ids, np.zeros(rows, bool))
        self._tokens = range(5, 5 + tokens)

    def prefill(self) -> Times:
        start = now()
        self._session.prefill(self._prompt, Policy((Full(),)))
        return now() - start

    def decode(self) -> Times:
        start = now()
        for token in self._tokens:
            self._session.decode(token)
        return (now() - start) / len(self._tokens)


def now() -> Times:
    """Wall clock and processor time of this process, [2] in milliseconds."""
    return 1000 * np.array([time.perf_counter(), time.process_time()])


def rounds(uncut: Runner, cut: Runner, count: int) -> dict[str, Times]:
    """Times [round, uncut or cut, wall or processor]; who goes first changes within each round."""
    found: dict[str, list[Times]] = {"prefill": [], "decode": []}
    for number in range(count + 1):
        prefill, decode = np.zeros((2, 2, 2)), np.zeros((2, 2, 2))  # turn, runner, clock
        for turn, order in enumerate(((0, 1), (1, 0))):
            for which in order:
                prefill[turn, which] = (uncut, cut)[which].prefill()
            for which in order:
                decode[turn, which] = (uncut, cut)[which].decode()
        if number:  # the first round warms up
            found["prefill"].append(prefill.mean(0))
            found["decode"].append(decode.mean(0))
    return {name: np.stack(times) for name, times in found.items()}


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--layers", type=int, default=4)
    args.add_argument("--hidden", type=int, default=2048)
    args.add_argument("--heads", type=int, default=16)
    args.add_argument("--ffn", type=int, default=5504)
    args.add_argument("--k", type=int, default=3, help="where the second bundle is cut")
    args.add_argument("--rows", type=int, default=640, help="rows of the prompt")
    args.add_argument("--tokens", type=int, default=12, help="tokens decoded at a stretch")
    args.add_argument("--rounds", type=int, default=15)
    args.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args.add_argument("--scratch", type=Path, help="folder for the weights, about 0.8 GB [default: here]")
    given = args.parse_args()
    sizes = {name: getattr(given, name) for name in ("layers", "hidden", "heads", "ffn")}
    with scratch(given.scratch) as folder:
        checkpoint = random_checkpoint(folder / "checkpoint", **sizes, vocab=None)
        bundles = [export(checkpoint, folder / name, ks) for name, ks in (("uncut", ()), ("cut", (given.k,)))]
        uncut, cut = (
            Runner(load(bundle, device="cpu", threads=given.threads), given.rows, given.tokens) for bundle in bundles
        )
        found = rounds(uncut, cut, given.rounds)
    figures: dict[str, Any] = {"sizes": sizes, "k": given.k, "rows": given.rows, "threads": given.threads}
    rows = [["", "uncut, ms", "cut, ms", "cut / uncut", "the same in processor time"]]
    for what, times in found.items():
        wall, processor = (spread((times[:, 1, clock] / times[:, 0, clock]).tolist()) for clock in (0, 1))
        one, two = (spread(times[:, which, 0].tolist()) for which in (0, 1))
        figures[what] = {"uncut_ms": one, "cut_ms": two, "ratio": wall, "processor_ratio": processor}
        rows.append([what, shown(one), shown(two), shown(wall, 4), shown(processor, 4)])
    report(figures, rows, given.json)


if __name__ == "__main__":
    main()
