"""Simulates servers that keep the K and V of pictures: is it worth that a question goes where its picture is?

    python -m benchmarks.fleet --miss 4.60 --hit 0.66 --token 0.175 --results docs/measurements/results/fleet.jsonl
    python -m benchmarks.fleet --bundle build/demo

Times of one server are given, or measured on a bundle. Prompts of a server run one after the other; while answers are
decoded, prompts and tokens share its time equally, and tokens of n answers take 1 + `--marginal` * (n - 1) times as
long as those of one, in one pass. A server keeps the pictures that it computed last. Clients of "zipf" ask about one of
`--pictures`, the most popular ones most often, at random times; each "camera" sends a frame that never comes again and
asks `QUESTIONS` about it. Questions go to the server that `vtx.tools.fleet.routing` chooses, or to the one with fewer
requests of two at random. Of servers that die one goes in the middle; its questions are asked again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, parser

from vtx.tools.fleet.routing import order

REPLICAS = (1, 2, 4, 8, 16, 32, 64)
SHOWN = (4, 64)  # of these in the table
TRAFFIC = ("zipf", "camera")
QUESTIONS = 4  # of a frame; the times between them and between frames, in times of a miss
GAP = 2.0
PERIOD = 20.0
WARM = 0.2  # the part of all requests that is not judged
REPEATS = 5  # of a measurement


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one server: a prompt whose picture is new (`miss`) or in its caches (`hit`), and a token alone."""

    miss: float
    hit: float
    token: float
    tokens: int = 16
    marginal: float = 0.2
    parallel: int = 4
    kept: int = 32

    @property
    def capacity(self) -> float:
        """Requests a second of one server, if all pictures are new."""
        batch = (1 + self.marginal * (self.parallel - 1)) / self.parallel
        return 1 / (self.miss + self.tokens * self.token * batch)


@dataclass(slots=True, eq=False)
class Question:
    """A request about a picture; `left` is the work that remains: seconds of its prompt, then tokens."""

    picture: str
    arrived: float
    left: float = 0.0
    first: float = math.nan
    hit: bool = False


@dataclass(slots=True)
class Server:
    """One server: what waits, the prompt that runs, the answers that are decoded, and the pictures that it has."""

    times: Times
    now: float = 0.0
    waiting: deque[Question] = field(default_factory=deque)
    prompt: Question | None = None
    decoding: list[Question] = field(default_factory=list)
    pictures: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.decoding) + (self.prompt is not None)

    @property
    def questions(self) -> list[Question]:
        """All that have no whole answer."""
        return [*self.waiting, *([] if self.prompt is None else [self.prompt]), *self.decoding]

    def advance(self, until: float) -> None:
        """Compute until this time."""
        while self.load:
            if self.prompt is None and self.waiting and len(self.decoding) < self.times.parallel:
                self._begin(self.waiting.popleft())
            share = 0.5 if self.prompt is not None and self.decoding else 1.0
            batch = 1 + self.times.marginal * (len(self.decoding) - 1)
            tokens = share / (self.times.token * batch)  # a second, of each answer
            ends = [question.left / tokens for question in self.decoding]
            ends += [] if self.prompt is None else [self.prompt.left / share]
            step = min(*ends, until - self.now) if len(ends) > 1 else min(ends[0], until - self.now)
            self.now += step
            for question in self.decoding:
                question.left -= step * tokens
            self.decoding = [question for question in self.decoding if question.left > 1e-9]
            if self.prompt is not None:
                self.prompt.left -= step * share
                if self.prompt.left <= 1e-9:
                    self._answer(self.prompt)
            if self.now >= until:
                return
        self.now = until

    def _begin(self, question: Question) -> None:
        question.hit = question.picture in self.pictures
        question.left = self.times.hit if question.hit else self.times.miss
        self.prompt = question

    def _answer(self, question: Question) -> None:
        """The prompt has ended: the first token is there, and the picture is kept."""
        self.prompt, question.first, question.left = None, self.now, float(self.times.tokens - 1)
        self.pictures[question.picture] = None
        self.pictures.move_to_end(question.picture)
        if len(self.pictures) > self.times.kept:
            self.pictures.popitem(last=False)
        if question.left:
            self.decoding.append(question)


def zipf(rate: float, number: int, pictures: int, draw: random.Random) -> Iterator[Question]:
    """Questions at random times about pictures whose popularity falls as 1 / rank."""
    weights = [*accumulate(1 / rank for rank in range(1, pictures + 1))]
    now = 0.0
    for _ in range(number):
        now += draw.expovariate(rate)
        [rank] = draw.choices(range(pictures), cum_weights=weights)
        yield Question(f"picture {rank}", now)


def cameras(rate: float, number: int, miss: float, draw: random.Random) -> list[Question]:
    """Questions of as many cameras as have this rate together."""
    period = PERIOD * miss
    count = max(1, round(rate * period / QUESTIONS))
    asked = [
        Question(f"camera {camera} frame {frame}", phase * period + frame * period + turn * GAP * miss)
        for camera, phase in enumerate(draw.random() for _ in range(count))
        for frame in range(math.ceil(number / count / QUESTIONS))
        for turn in range(QUESTIONS)
    ]
    return sorted(asked, key=lambda question: question.arrived)


def simulate(
    questions: Sequence[Question], replicas: int, times: Times, draw: random.Random, *, affinity: bool, dies: bool
) -> dict[str, float]:
    """The hit rate, and p50 and p99 of the first token in seconds, after a warm-up."""
    servers = {f"replica {number}": Server(times) for number in range(replicas)}
    middle = len(questions) // 2 if dies else -1

    def send(question: Question, now: float) -> None:
        for server in servers.values():
            server.advance(now)
        loads = {name: server.load for name, server in servers.items()}
        if affinity:
            name = order(question.picture, loads, least=times.parallel)[0]
        else:
            name = min(draw.sample([*loads], min(2, len(loads))), key=loads.__getitem__)
        servers[name].waiting.append(question)

    for number, question in enumerate(questions):
        if number == middle:
            for server in servers.values():
                server.advance(question.arrived)
            for lost in servers.pop("replica 0").questions:
                lost.first = math.nan
                send(lost, question.arrived)
        send(question, question.arrived)
    for server in servers.values():
        server.advance(math.inf)
    judged = questions[int(WARM * len(questions)) :]
    waits = sorted(question.first - question.arrived for question in judged)
    return {
        "hit_rate": sum(question.hit for question in judged) / len(judged),
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[math.ceil(0.99 * len(waits)) - 1],
    }


def measured(bundle: Path, tokens: int) -> Times:
    """The times of a bundle on this machine: medians."""
    import numpy as np

    from vtx.runtime.api.load import load

    misses = list[float]()
    hits = list[float]()
    per_token = list[float]()
    with load(bundle) as model:
        for seed in range(REPEATS + 1):  # the first one warms up
            picture = np.random.default_rng(seed).integers(0, 256, (336, 336, 3), np.uint8)
            with model.open(picture) as conversation:
                for question, seconds in (("What is it?", misses), ("Which colour?", hits)):
                    answer = conversation.ask(question, max_new_tokens=tokens, ignore_eos=True)
                    seconds.append(answer.stats.timings_ms["first_token"] / 1000)
                    per_token.append(answer.stats.timings_ms["decode_per_token"] / 1000)
    return Times(*(statistics.median(values[1:]) for values in (misses, hits, per_token)), tokens=tokens)


def rows_of(times: Times, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of servers, kind of traffic, way of routing and seed."""
    for traffic in TRAFFIC:
        for replicas in args.replicas:
            for dies in (False, True)[: 1 + (replicas > 1)]:
                for affinity in (True, False):
                    for seed in range(args.seeds):
                        draw = random.Random(seed)
                        rate = args.load * replicas * times.capacity
                        number = max(args.least, args.each * replicas)
                        if traffic == "zipf":
                            questions = [*zipf(rate, number, args.pictures, draw)]
                        else:
                            questions = cameras(rate, number, times.miss, draw)
                        figures = simulate(questions, replicas, times, draw, affinity=affinity, dies=dies)
                        yield {
                            "traffic": traffic,
                            "replicas": replicas,
                            "dies": dies,
                            "affinity": affinity,
                            "seed": seed,
                            "requests": len(questions),
                            **figures,
                        }


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The figures of `SHOWN`, medians of seeds, by picture and at random."""
    columns = ["replicas", "hits by picture, at random, %", "first token p50, s", "p99, s"]
    lines = list[list[str]]()
    for traffic, replicas, dies in dict.fromkeys((row["traffic"], row["replicas"], row["dies"]) for row in rows):
        if replicas not in SHOWN or (dies and replicas > SHOWN[0]):
            continue
        line = [f"{traffic} {replicas}" + ", one dies" * dies]
        for name, scale, form in (("hit_rate", 100, "{:.0f}"), ("p50_s", 1, "{:.2f}"), ("p99_s", 1, "{:.1f}")):
            medians = list[str]()
            for affinity in (True, False):
                asked = traffic, replicas, dies, affinity
                values = [
                    scale * row[name]
                    for row in rows
                    if (row["traffic"], row["replicas"], row["dies"], row["affinity"]) == asked
                ]
                medians.append(form.format(statistics.median(values)))
            line.append(", ".join(medians))
        lines.append(line)
    return columns, lines


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--bundle", type=Path, help="measure the times on this bundle")
    for name in ("miss", "hit", "token"):
        options.add_argument(f"--{name}", type=float, help="seconds, if they are not measured")
    options.add_argument("--tokens", type=int, default=16)
    options.add_argument("--load", type=float, default=0.5, help="of what servers can do if all pictures are new")
    options.add_argument("--pictures", type=int, default=500)
    options.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    options.add_argument("--each", type=int, default=60, help="requests of each server")
    options.add_argument("--least", type=int, default=2400, help="requests in total, at least")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--results", type=Path, help="write all rows and the page's table here")
    args = options.parse_args()
    if args.bundle is None and None in (args.miss, args.hit, args.token):
        options.error("give --bundle, or --miss, --hit and --token")
    times = (
        Times(args.miss, args.hit, args.token, args.tokens)
        if args.bundle is None
        else measured(args.bundle, args.tokens)
    )
    rows = [*rows_of(times, args)]
    columns, lines = table(rows)
    print(times, markdown([columns, *lines]), sep="\n\n")
    if args.results is not None:
        write_results(args.results, times, rows, columns, lines)


def write_results(
    target: Path, times: Times, rows: Sequence[dict[str, Any]], columns: list[str], lines: list[list[str]]
) -> None:
    """Both tables: the page's, and all rows."""
    command = f"python -m benchmarks.fleet --miss {times.miss} --hit {times.hit} --token {times.token}"
    text = [
        {
            "table": "simulated",
            "columns": columns,
            "align": ["---"] + ["---:"] * (len(columns) - 1),
            "caption": f"simulated, not run; `{command}`",
            "recorded": "2026-11",
        }
    ]
    text += [{"table": "simulated", "row": line} for line in lines]
    text.append({"table": "rows", "columns": [*rows[0]], "align": ["---"] * len(rows[0]), "recorded": "2026-11"})
    text += [{"table": "rows", "row": [*row.values()]} for row in rows]
    target.write_text("".join(f"{json.dumps(line)}\n" for line in text), encoding="utf-8")


if __name__ == "__main__":
    main()
