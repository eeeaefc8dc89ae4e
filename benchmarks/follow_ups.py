"""Chats at the same time, each about a picture of its own: the first token of the first question and of later ones.

    python -m benchmarks.follow_ups                              vtx-serve alone, at the shape 1b, int8
    python -m benchmarks.follow_ups --llama BUILD/bin --results docs/measurements/results/follow-ups.jsonl

As many chats as `--clients` says run at a time, each one request after the other and, as chat programs do it, with the
whole chat and its picture in each; the sides "uuid" send the picture once. No server has seen a picture before. All
servers hold the model at the same time and are asked in turn, each beginning in its turn; each round is kept in --work,
and the same command goes on after the last one. No round begins after --minutes. Times are the client's. Run it from
the root of the repository on a quiet machine. `--llama` is as for benchmarks.serving; on processors with AMX add
`--no-amx`, which keeps vtx from what llama.cpp's default build has not.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from benchmarks.common import BUSY_BEFORE, markdown, parser, report
from benchmarks.load import llama
from benchmarks.pictures import picture
from benchmarks.serving import ANSWER_SECONDS, given_bundle, made_checkpoint, model_options, running, serve_command

from vtx.tools.bench.machine import describe
from vtx.tools.bench.series import shown, spread
from vtx.tools.data.journal import ResultJournal

PARALLEL = 8
CONTEXT = 2048  # of a chat on llama.cpp's server: a random model's answers are read again as more tokens
QUESTIONS = ("what is this?", "which colour has it?", "what is beside it?", "is it whole?")
TABLE = "follow-ups"


@dataclass(frozen=True, slots=True)
class Side:
    """A server, and how it is asked: `fields` of each request; `once`: the picture is sent once, by a uuid."""

    command: tuple[str, ...]
    fields: dict[str, Any]
    once: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of a chat: seconds to the first token and to the end, prompt tokens, those of them that were cached,
    and bytes that were sent.
    """

    turn: int
    first_s: float
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    sent: int


def main() -> None:
    given = arguments()
    sides = sides_of(given)
    about = {
        "model": given.shape,
        "precision": given.precision,
        "tokens": given.tokens,
        "clients": given.clients,
        "amx": not given.no_amx,
        "sides": list(sides),
    }
    with ResultJournal(given.work / "follow-ups.jsonl", about) as journal:
        if len(journal.results) < given.rounds:
            measure(sides, journal, given)
        rounds = list(journal.results.values())
    if not rounds:
        sys.exit("no round was finished; give it more --minutes")
    rows = [row for one in rounds for row in one["rows"]]
    table = summary(rows)
    report({**about, "rounds": rounds}, table, given.json)
    if given.results is not None:
        write_results(given.results, given, rounds, table)


def arguments() -> argparse.Namespace:
    args = parser(__doc__ or "")
    model_options(args)
    args.add_argument("--clients", default="1,4,8", help="numbers of chats at a time, at most 8 [%(default)s]")
    args.add_argument("--tokens", type=int, default=16, help="of an answer [%(default)s]")
    args.add_argument("--minutes", type=float, default=30, help="no round begins after these [%(default)s]")
    args.add_argument("--ks", default="none,9", help="of vtx [%(default)s]")
    args.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server and llama-quantize")
    args.add_argument("--no-amx", action="store_true", help="keep vtx from AMX")
    args.add_argument("--results", type=Path, help="write all rows and the page's table here")
    given = args.parse_args()
    given.work = given.work.resolve()
    return given


def sides_of(given: argparse.Namespace) -> dict[str, Side]:
    """The servers by name; the model is made where it is not there yet."""
    bundle = given_bundle(given)
    if given.no_amx:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    command = tuple(serve_command(given, bundle, PARALLEL))
    sides = dict[str, Side]()
    for k in given.ks.split(","):
        fields = {"k": k if k == "none" else int(k), "reduce": "none"}
        sides[f"vtx-serve, K = {k}"] = Side(command, fields)
        sides[f"vtx-serve, K = {k}, uuid"] = Side(command, fields, once=True)
    if given.llama is not None:
        made_checkpoint(given.work / f"checkpoint-{given.shape}", given.shape)
        sides["llama.cpp's server"] = Side(tuple(llama(given, CONTEXT)), {})
    return sides


def measure(sides: dict[str, Side], journal: ResultJournal, given: argparse.Namespace) -> None:
    """Rounds until there are enough, or until the time is over."""
    end = time.monotonic() + 60 * given.minutes
    counts = list(map(int, given.clients.split(",")))
    with ExitStack() as stack:
        ports = dict[tuple[str, ...], int]()
        for side in sides.values():
            if side.command not in ports:
                log = given.work / f"follow-ups-{len(ports)}.log"
                ports[side.command], _ = stack.enter_context(running(side.command, log))
                chat(ports[side.command], side, picture(time.time_ns()), 2)  # warms up
        while len(journal.results) < given.rounds and time.monotonic() < end:
            number = len(journal.results)
            busy = psutil.getloadavg()[0]
            rows = list(one_round(sides, ports, counts, number, given.tokens))
            journal.add({f"round {number}": {"load_before": busy, "rows": rows}})
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)


def one_round(
    sides: dict[str, Side], ports: dict[tuple[str, ...], int], counts: Sequence[int], number: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each question to every side at each number of clients; a side begins in its turn."""
    names = list(sides)
    start = number % len(names)
    for clients in counts:
        for name in [*names[start:], *names[:start]]:
            side = sides[name]
            pictures = [picture(time.time_ns()) for _ in range(clients)]
            with ThreadPoolExecutor(clients) as pool:
                ask = partial(chat, ports[side.command], side, tokens=tokens)
                chats = list(pool.map(ask, pictures))
            for client, turns in enumerate(chats):
                about = {"round": number, "side": name, "clients": clients, "client": client}
                yield from ({**about, **asdict(turn)} for turn in turns)


def chat(port: int, side: Side, image: str, tokens: int) -> list[Turn]:
    """The turns of a chat about a new picture."""
    turns = list[Turn]()
    messages = list[dict[str, Any]]()
    name = {"uuid": f"picture-{time.time_ns()}-{id(messages)}"} if side.once else {}
    for number, question in enumerate(QUESTIONS):
        part: dict[str, Any] = {"type": "image_url", **name}
        if number == 0 or not side.once:
            part["image_url"] = {"url": image}
        text = {"type": "text", "text": question}
        messages.append({"role": "user", "content": [text] if number else [part, text]})
        messages[0]["content"][0] = part
        turn, answer = asked(port, {"messages": messages, **side.fields}, tokens, number)
        turns.append(turn)
        messages.append({"role": "assistant", "content": answer})
    return turns


def asked(port: int, fields: dict[str, Any], tokens: int, number: int) -> tuple[Turn, str]:
    """A question, streamed, and its answer of exactly `tokens`."""
    fixed = {"model": "model", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({**fixed, **options, **fields}).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)) as connection:
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
        first = 0.0
        answer = ""
        usage: dict[str, Any] = {}
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                answer += choice["delta"].get("content") or ""
            first = first or (time.perf_counter() - start if answer else 0.0)
        whole = time.perf_counter() - start
    if usage.get("completion_tokens") != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for, the answer's usage is {usage}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Turn(number, first or whole, whole, usage["prompt_tokens"], cached, len(body)), answer or "a"


def summary(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table of all rows: medians of the rounds' medians, with the least and the largest of them."""
    table = [["", "chats at a time", "first question, first token, s", "later ones, s", "later ones, cached, %", "kB"]]
    for key in dict.fromkeys((row["side"], row["clients"]) for row in rows):
        mine = [row for row in rows if (row["side"], row["clients"]) == key]
        later = [row for row in mine if row["turn"]]
        cached = statistics.median(100 * row["cached_tokens"] / row["prompt_tokens"] for row in later)
        sent = statistics.median(row["sent"] for row in later) / 1000
        times = [shown(spread(by_round(part))) for part in ([row for row in mine if not row["turn"]], later)]
        table.append([key[0], str(key[1]), *times, f"{cached:.0f}", f"{sent:.1f}"])
    return table


def by_round(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The median seconds to the first token of each round."""
    rounds = sorted({row["round"] for row in rows})
    return [statistics.median(row["first_s"] for row in rows if row["round"] == number) for number in rounds]


def write_results(
    path: Path, given: argparse.Namespace, rounds: Sequence[dict[str, Any]], table: Sequence[Sequence[str]]
) -> None:
    """The page's table, and behind it every question that was asked."""
    loads = ", ".join(f"{one['load_before']:.1f}" for one in rounds)
    head = {
        "table": TABLE,
        "columns": table[0],
        "align": ["---", *["---:"] * (len(table[0]) - 1)],
        "caption": f"run on CPU: {describe().cpu}; {given.shape} in {given.precision}, {len(rounds)} rounds, "
        f"load before each {loads}, {BUSY_BEFORE:g}% of the cores busy before",
    }
    lines: list[dict[str, Any]] = [head, *({"table": TABLE, "row": row} for row in table[1:])]
    lines += [{"table": f"{TABLE}-raw", "row": row} for one in rounds for row in one["rows"]]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(markdown(table), file=sys.stderr)


if __name__ == "__main__":
    main()
