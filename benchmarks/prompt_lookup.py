"""What prompt lookup gives: drafts accepted on patterns of text, and with --bundle what a pass of several tokens costs.

Acceptance needs no model: an answer that is known beforehand is drafted and verified as `vtx.runtime.session.generate`
does it. A token is a word or a punctuation mark here. With the cost of a pass in single tokens, the two say how much
faster an answer of each pattern is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report

from vtx.runtime.prompt.lookup import PromptLookup
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.bench.series import Series, shown, spread

DOCS = Path(__file__).parents[1] / "docs"
TOKEN = re.compile(r" ?\w+|[^\w\s]|\s")
LENGTHS = (2, 3, 5, 9, 17)  # tokens of a pass
Pattern = tuple[str, str]  # a prompt and its answer


def patterns() -> dict[str, Pattern]:
    prose = DOCS.joinpath("methods.md").read_text(encoding="utf-8")
    start = prose.index("\n\n", 2000)
    passage = prose[start : start + 1500]
    lines = [f'{{"name": "item {n}", "count": {n * 7 % 10}, "shelf": "{"abc"[n % 3]}"}}' for n in range(20)]
    cells = "\n".join(f"| {n} | circle | {('red', 'blue', 'green')[n * 5 % 3]} | top left |" for n in range(20))
    edited = re.sub(r"\b(the|of|is)\b", lambda m: m[0].upper() if m.start() % 5 == 0 else m[0], passage)
    return {
        "a passage of the prompt, word for word": (f"Copy this:{passage}", passage),
        "the same with a word changed here and there": (f"Correct this:{passage}", edited),
        "objects of JSON, each like the one before": ("List the items as JSON.", "\n".join(lines)),
        "rows of a table": ("Make a table of the shapes.", cells),
        "prose that the prompt does not hold": ("Explain the methods.", passage),
    }


def drafted(prompt: str, answer: str, most: int) -> dict[str, float]:
    """Tokens of an answer, of its drafts, of those accepted; its passes, and how many of them have each length."""
    known = TOKEN.findall(answer)
    numbers = {token: n for n, token in enumerate(dict.fromkeys([*TOKEN.findall(prompt), *known]))}
    ids = [numbers[token] for token in known]
    lookup, at, lengths = PromptLookup([numbers[token] for token in TOKEN.findall(prompt)], most), 0, list[int]()
    while at < len(ids) - 1:  # token `at` is sampled; the pass that decodes it verifies a draft
        lookup.push(ids[at])
        draft = lookup.draft(len(ids) - at - 2)
        lengths.append(1 + len(draft))
        at += 1
        for token in draft:
            if token != ids[at]:
                break
            lookup.push(token)
            lookup.accept()
            at += 1
    return {
        "tokens": len(ids), "drafted": lookup.drafted, "accepted": lookup.accepted, "passes": len(lengths),
        **{f"pass of {n}": lengths.count(n) for n in sorted(set(lengths))},
    }  # fmt: skip


class Passes:
    """A bundle's decoder in the middle of an answer; `cost` is what a pass of some tokens takes."""

    def __init__(self, bundle: Path, device: str, compute: str | None, slots: int, threads: int | None) -> None:
        from vtx.runtime.api.load import load

        self.model = load(bundle, device=device, compute=compute, threads=threads, force=True)
        self._slots, backend = slots, self.model.backend
        self._stages = [
            backend.stage(n, self.model.manifest.max_context) for n in range(len(self.model.manifest.stages))
        ]
        self._run(slots)

    def _run(self, tokens: int) -> None:
        backend, first = self.model.backend, self._stages[0].length
        hidden = backend.embed(np.arange(5, 5 + tokens)).hidden
        for stage in self._stages:
            hidden = stage.append(TokenStates(hidden), np.arange(first, first + tokens))
        backend.head(hidden[-17:])

    def cost(self, tokens: int) -> float:
        """Milliseconds; the tokens leave the caches again."""
        start = time.perf_counter()
        self._run(tokens)
        took = 1000 * (time.perf_counter() - start)
        for stage in self._stages:
            stage.keep(self._slots)
        return took


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--most", type=int, default=8, help="tokens of the longest draft")
    args.add_argument("--bundle", type=Path, help="measure passes of this bundle")
    args.add_argument("--device", default="auto")
    args.add_argument("--compute")
    args.add_argument("--slots", type=int, default=640, help="tokens in the caches")
    args.add_argument("--rounds", type=int, default=12)
    args.add_argument("--threads", type=int)
    given = args.parse_args()
    found = {name: drafted(*pattern, given.most) for name, pattern in patterns().items()}
    table = [["answer", "tokens", "accepted of drafted", "tokens per pass"]]
    for name, counts in found.items():
        share = f"{counts['accepted']} of {counts['drafted']}"
        table.append([name, str(counts["tokens"]), share, f"{counts['tokens'] / counts['passes']:.2f}"])
    figures: dict[str, Any] = {"most": given.most, "patterns": found}
    if given.bundle:
        costs = measured(Passes(given.bundle, given.device, given.compute, given.slots, given.threads), given.rounds)
        figures["cost of a pass, in passes of one token"] = costs
        table[0].append("speed-up")
        for row, counts in zip(table[1:], found.values(), strict=True):
            row.append(f"{counts['tokens'] / passes_in_tokens(counts, costs):.2f}")
        print("\n".join(f"a pass of {n} tokens by one of one: {shown(cost)}" for n, cost in costs.items()))
    report(figures, table, given.json)


def measured(passes: Passes, rounds: int) -> dict[int, Series]:
    """For each length of a pass what it takes, by a pass of one token right before it."""
    ratios: dict[int, list[float]] = {n: [] for n in LENGTHS}
    for number in range(rounds + 1):
        for n in LENGTHS:
            one = passes.cost(1)
            if number:
                ratios[n].append(passes.cost(n) / one)
            else:
                passes.cost(n)
    return {n: spread(of_one) for n, of_one in ratios.items()}


def passes_in_tokens(counts: dict[str, float], costs: dict[int, Series]) -> float:
    """All passes of an answer in passes of one token, lengths between those measured by interpolation."""
    at: Sequence[float] = [1, *costs]
    of: Sequence[float] = [1, *(cost.median for cost in costs.values())]
    lengths = {int(name.removeprefix("pass of ")): n for name, n in counts.items() if name.startswith("pass of ")}
    return sum(n * float(np.interp(length, at, of)) for length, n in lengths.items())


if __name__ == "__main__":
    main()
