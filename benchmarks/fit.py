"""What does vtx-fit choose on bundles, is its guarantee kept on questions that it never saw, and what does it cost?

    python benchmarks/fit.py demo-fp16 demo-int8 --out build/fit-demo --name demo

Every configuration answers every question once; the answers are kept in --out, so an interrupted run resumes. Then
vtx-fit's own code searches and tests, answer by answer from what was kept, on --splits random draws of --fitted images;
its choice is judged on the images that are left. Beside it the exhaustive search: the same test on the fastest
configurations that keep the answers by all questions that the search may see. Times are those of --timed questions,
asked alone, one after the other: on each draw vtx-fit sees a half of them in a row, from a random one on, and the
others say whether 99 of 100 unseen first tokens keep the budget. A bound of that takes 299 times, in turns of a sixth
of what it sees.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import markdown, parser

from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.devices import DeviceChoice, open_backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.policies import parse
from vtx.runtime.strict import json_value
from vtx.tools.bench.machine import describe
from vtx.tools.bench.methods import Method
from vtx.tools.common.files import write_json
from vtx.tools.data.items import Item, plain, scene_items
from vtx.tools.data.journal import ResultJournal
from vtx.tools.fit.asking import KeptAnswers, Questions, TimedAnswer
from vtx.tools.fit.fit import fit
from vtx.tools.fit.search import Budget
from vtx.tools.fit.settings import Setting, engines_of, find_settings

TOKENS = 32


@dataclass(frozen=True, slots=True)
class Kept:
    """Every answer [settings][questions], plain, and some times of each setting."""

    settings: tuple[Setting, ...]
    reference: Setting
    texts: dict[Setting, list[str]]
    replies: dict[Setting, list[TimedAnswer]]


class Replay:
    """Answers of some questions of the pool, by their numbers there, as `KeptAnswers` gives them."""

    def __init__(self, kept: Kept, numbers: Sequence[int], timed: Sequence[int], turn: int) -> None:
        names = tuple(f"image {n}" for n in numbers)
        self.questions: Any = SimpleNamespace(images=names, digests=names, data=SimpleNamespace(source="the scenes"))
        self._kept, self._numbers, self._timed, self._turn = kept, numbers, timed, turn
        self._held_out = dict[
            int, int
        ]()  # the questions held out by their place, each turn of which has times of its own
        self._asked = set[tuple[Setting, int]]()
        self.skipped: dict[int, str] = {}
        self.loading_s = 0.0

    @property
    def asked(self) -> int:
        return len(self._asked)

    def ask(self, settings: Sequence[Setting], numbers: Sequence[int], phase: str, turn: int = 0) -> None:
        if phase == "testing":
            self._held_out = {n: place for place, n in enumerate(numbers)}
        if not turn:
            self._asked |= {(setting, n) for setting in settings for n in numbers}

    def usable(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def reply(self, setting: Setting, number: int, turn: int = 0) -> TimedAnswer:
        place = turn * self._turn + self._held_out.get(number, number)
        seen = self._timed[place % len(self._timed)]
        return self._kept.replies[setting][seen]

    def changed(self, setting: Setting, reference: Setting, number: int) -> float:
        n = self._numbers[number]
        return float(self._kept.texts[setting][n] != self._kept.texts[reference][n])


def collect(bundles: Sequence[Path], items: Sequence[Item], timed: int, out: Path, threads: int) -> Kept:
    """Every answer, those of an image one after the other, so that its tower runs once."""
    opened = [Bundle.open(path) for path in bundles]
    reference, settings = find_settings([on for bundle in opened for on in engines_of(bundle, "cpu")], None)
    settings = [s for s in settings if s.reduce == "none" or len(parse(s.reduce)) == 1]
    texts: dict[Setting, list[str]] = {s: [] for s in settings}
    identity = {"model": reference.on.digest, "settings": [s.name for s in settings]}
    with ResultJournal(out / "texts.jsonl", identity) as journal:
        for on in dict.fromkeys(s.on for s in settings):
            own, start = [s for s in settings if s.on == on], time.monotonic()
            backend = open_backend(on.bundle, DeviceChoice(on.device, on.compute, "a candidate"), threads)
            with Model(on.bundle, backend, 0.0) as model:
                for n, item in enumerate(items):
                    if f"{on.name} {n}" not in journal.results:
                        with model.open(list(item.images)) as image:
                            found = [image.ask(item.question, s.k, Options(TOKENS), reduce=s.reduce).text for s in own]
                        journal.add({f"{on.name} {n}": {"texts": found}})
                    for setting, text in zip(own, journal.results[f"{on.name} {n}"]["texts"], strict=True):
                        texts[setting].append(plain(text))
                    if n % 100 == 99:
                        print(f"{on.name}: {n + 1} of {len(items)}, {time.monotonic() - start:.0f} s", flush=True)
    questions = Questions.of(SimpleNamespace(items=tuple(items[:timed]), source="scenes", skipped=()))  # type: ignore[arg-type]
    with (
        ResultJournal(out / "times.jsonl", identity) as journal,
        KeptAnswers(questions, journal, TOKENS, threads, lambda *_: None) as kept_answers,
    ):
        kept_answers.ask(settings, range(timed), "timing")
        replies = {s: [kept_answers.reply(s, n) for n in range(timed)] for s in settings}
    return Kept(tuple(settings), reference, texts, replies)


def share(kept: Kept, setting: Setting, numbers: Sequence[int]) -> float:
    """The share of changed answers."""
    mine, full = kept.texts[setting], kept.texts[kept.reference]
    return float(np.mean([mine[n] != full[n] for n in numbers]))


def ms(kept: Kept, setting: Setting) -> float:
    return float(np.median([reply.answer_ms for reply in kept.replies[setting]]))


def judge(kept: Kept, budget: Budget, allowed: Sequence[Setting], splits: int, fitted: int) -> dict[str, Any]:
    """Choices on random splits, and how each does on the images that are left."""
    count, rows = len(kept.texts[kept.reference]), list[dict[str, Any]]()
    for seed in range(splits):
        numbers = random.Random(seed).sample(range(count), fitted)
        left = sorted({*range(count)} - {*numbers})
        timed = len(kept.replies[kept.reference])
        start, half = random.Random(seed).randrange(timed), timed // 2
        clocked = [n % timed for n in range(start, start + timed)]
        replay: Any = Replay(kept, numbers, clocked[:half], half // 6)
        found = fit(allowed, kept.reference, replay, budget, seed, timed=half // 6)
        chosen = found.chosen
        fitting = [
            s for s in allowed
            if share(kept, s, numbers) <= budget.limit
            and not budget.over(*clocks(kept, s))
        ]  # fmt: skip
        best = min(fitting, key=lambda s: ms(kept, s), default=None)
        rows.append({
            "chosen": None if chosen is None else short_name(chosen),
            "ms": None if chosen is None else ms(kept, chosen),
            "unseen": 0.0 if chosen is None else share(kept, chosen, left), "asked": replay.asked,
            "upper": None if chosen is None else found.evidence[chosen].upper,
            "p99_upper": None if chosen is None else found.evidence[chosen].first_token_ms.p99_upper,
            "p99_unseen": None if chosen is None else p99(
                [kept.replies[chosen][n].first_token_ms for n in clocked[half:]]
            ),
            "quiet": found.quiet,
            "exhaustive": None if best is None else short_name(best),
            "exhaustive_ms": None if best is None else ms(kept, best),
            "exhaustive_unseen": 0.0 if best is None else share(kept, best, left),
        })  # fmt: skip
    made = [row for row in rows if row["chosen"] is not None]
    first = budget.first_token_ms
    return {
        "quiet": sum(row["quiet"] for row in rows),
        "under_p99_upper": None if first is None else sum(row["p99_unseen"] <= row["p99_upper"] for row in made),
        "under_upper": sum(row["unseen"] <= row["upper"] for row in made),
        "in_time": None if first is None else sum(row["p99_unseen"] <= first for row in made),
        "budget": json_value(budget), "settings": len(allowed), "exhaustive_asked": len(allowed) * fitted,
        "found": sum(row["chosen"] is not None for row in rows),
        "kept_bound": sum(row["chosen"] is not None and row["unseen"] <= budget.limit for row in rows),
        "exhaustive_kept_bound": sum(
            row["exhaustive"] is not None and row["exhaustive_unseen"] <= budget.limit for row in rows
        ),
        "splits": rows,
    }  # fmt: skip


def short_name(setting: Setting) -> str:
    return f"{setting.on.name}: {Method(setting.k, setting.reduce).name}"


def p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99))


def clocks(kept: Kept, setting: Setting) -> tuple[float, float | None]:
    """The 99th percentile of the times of the first token, and of a further one."""
    replies = kept.replies[setting]
    decoded = [r.per_token_ms for r in replies if r.per_token_ms is not None]
    return p99([r.first_token_ms for r in replies]), p99(decoded) if decoded else None


def mean(values: list[float], form: str) -> str:
    return form.format(np.mean(values)) if values else "-"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("bundles", type=Path, nargs="+")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--name", required=True)
    options.add_argument("--images", type=int, default=2400, help="with one question each")
    options.add_argument("--fitted", type=int, default=400, help="of them, that a search sees or tests with")
    options.add_argument("--splits", type=int, default=100)
    options.add_argument("--timed", type=int, default=960)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    kept = collect(args.bundles, scene_items(args.images), args.timed, args.out, args.threads)
    keeping = [s for s in kept.settings if share(kept, s, range(args.images)) <= 0.05]
    medians = sorted(clocks(kept, s)[0] for s in keeping)
    smallest = min(s.on.memory for s in kept.settings)
    light = [s for s in kept.settings if s.on.memory == smallest]
    limit = 1.2 * medians[len(medians) // 2]
    runs = {
        "98% kept": judge(kept, Budget(0.98), kept.settings, args.splits, args.fitted),
        f"95% kept, the first token within {limit:.1f} ms": judge(
            kept, Budget(0.95, limit), kept.settings, args.splits, args.fitted
        ),
        "90% kept, the smallest bundle": judge(kept, Budget(0.9), light, args.splits, args.fitted),
    }
    table, choices = [["budget", "chosen most often", "changed, of unseen", "within the limit", "99% in time",
                       "99th percentile below its bound", "answer, ms", "answers computed", "exhaustive choice",
                       "within the limit", "answer, ms", "answers computed"]], dict[str, Any]()  # fmt: skip
    for name, run in runs.items():
        rows = run["splits"]
        names = [row["chosen"] or "nothing" for row in rows]
        often = max(set(names), key=names.count)
        best = [row["exhaustive"] or "nothing" for row in rows]
        table.append([
            name, f"{often} ({names.count(often)})",
            mean([100 * r["unseen"] for r in rows if r["chosen"]], "{:.2f}%"),
            f"{run['kept_bound']} of {run['found']}",
            "-" if run["in_time"] is None else f"{run['in_time']} of {run['found']}",
            "-" if run["in_time"] is None else f"{run['under_p99_upper']} of {run['found']}",
            mean([r["ms"] for r in rows if r["ms"]], "{:.1f}"),
            f"{np.mean([r['asked'] for r in rows]):.0f}", max(set(best), key=best.count),
            f"{run['exhaustive_kept_bound']} of {sum(r['exhaustive'] is not None for r in rows)}",
            mean([r["exhaustive_ms"] for r in rows if r["exhaustive_ms"]], "{:.1f}"),
            str(run["exhaustive_asked"]),
        ])  # fmt: skip
        firsts = [r.first_token_ms for s in kept.settings if short_name(s) == often for r in kept.replies[s]]
        choices[name] = {
            "first_token": [float(np.median(firsts)), p99(firsts)] if firsts else None,
            "quiet": run["quiet"],
        }
    lines = [{"table": args.name, "columns": table[0], "align": ["---"] * len(table[0])}]
    lines += [{"table": args.name, "row": row} for row in table[1:]]
    for name, run in runs.items():
        of = {
            key: [row[key] for row in run["splits"]] for key in ("chosen", "unseen", "upper", "p99_upper", "p99_unseen")
        }
        of |= {key: run[key] for key in ("settings", "found", "kept_bound", "under_upper", "in_time", "quiet")}
        lines.append({"table": args.name, "splits": {"name": name, **json_value(run["budget"]), **of}})
    lines.append({"table": args.name, "machine": json_value(describe())})
    (args.out / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(f"{describe().in_words()}\n\n{markdown(table)}\n\n{json.dumps(choices, indent=1)}")
    figures = {"machine": json_value(describe()), "name": args.name, "runs": runs, "table": table, "times": choices}
    for target in (args.out / "fit.json", args.json):
        if target is not None:
            write_json(target, figures)


if __name__ == "__main__":
    main()
