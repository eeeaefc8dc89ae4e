"""What conversations side by side cost: tokens per second of 1, 2, 4 and 8 clients of vtx-serve, and a short question
beside a long answer. And what a batch would cost: a decode step of 1, 2, 4 and 8 rows, whose weights are read once.

    python benchmarks/serving.py BUNDLE

Client counts take turns within each round. The step of a batch is that of as many new rows of one conversation: the
same matrix products as those of a batch, with attention over one cache instead of several.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from common import parser, report

import vtx
from vtx.exporter.bench.series import shown, spread
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.limits import Limits

CLIENTS = (1, 2, 4, 8)
SLOTS = 640  # filled when a step is measured: an image of LLaVA-1.5 and a question


@contextmanager
def serving(bundle: Path, threads: int | None) -> Iterator[tuple[int, Engines]]:
    """The port of a server of `bundle`, and its engines."""
    import uvicorn

    from vtx.runtime.server.app import make_app

    limits = Limits(parallel=max(CLIENTS), new_tokens=4096)
    engines = Engines({"model": bundle}, lambda folder: vtx.load(folder, device="cpu", threads=threads), limits)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(engines, limits), log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1], engines
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, question: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of a streamed answer, and to its end."""
    body = {"model": "model", "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "k": "none",
            "reduce": "none", "ignore_eos": True, "stream": True}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port)
    start, first = time.perf_counter(), 0.0
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while response.readline():
        first = first or time.perf_counter()
    connection.close()
    return first - start, time.perf_counter() - start


def side_by_side(port: int, clients: int, tokens: int) -> float:
    """Tokens per second of all clients together."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda n: ask(port, f"question {n} of {time.time_ns()}", tokens), range(clients)))
    return clients * tokens / (time.perf_counter() - start)


def beside_a_long_one(port: int, tokens: int) -> float:
    """Seconds to the end of an answer of 4 tokens while one of many runs."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, port, f"a long answer {time.time_ns()}", tokens)
        time.sleep(0.2)
        _, seconds = ask(port, f"a short one {time.time_ns()}", 4)
        long.result()
    return seconds


def step_ms(model: vtx.Model, rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
    """Milliseconds in which a decode step of so many rows runs through all stages and the head."""
    manifest, backend = model.manifest, model.backend
    slots = min(SLOTS, manifest.max_context - max(rows))
    hidden = np.random.default_rng(0).standard_normal((max(rows), manifest.model.hidden)).astype(np.float32)
    prompt = np.random.default_rng(1).standard_normal((slots, manifest.model.hidden)).astype(np.float32)
    caches = [backend.stage(number, manifest.max_context) for number in range(len(manifest.stages))]
    for cache in caches:
        cache.append(prompt, np.arange(slots))

    def step(count: int) -> None:
        state = hidden[:count]
        for cache in caches:
            cache.keep(slots)
            state = cache.append(state, np.arange(slots, slots + count))
        backend.head(state)

    return alternating({count: lambda count=count: timed(lambda: step(count)) for count in rows}, repeats)


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def alternating(calls: dict[int, Callable[[], float]], repeats: int) -> dict[int, list[float]]:
    """What each call gives, one of each in turn; the first round warms up."""
    rounds = [{name: call() for name, call in calls.items()} for _ in range(repeats + 1)][1:]
    return {name: [one[name] for one in rounds] for name in calls}


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("bundle", type=Path)
    args.add_argument("--threads", type=int)
    args.add_argument("--tokens", type=int, default=48)
    args.add_argument("--rounds", type=int, default=5)
    given = args.parse_args()
    with serving(given.bundle, given.threads) as (port, engines):
        sides = {n: lambda n=n: side_by_side(port, n, given.tokens) for n in CLIENTS}
        rates = alternating(sides, given.rounds)
        short = alternating(
            {0: lambda: 1000 * ask(port, "alone", 4)[1], 1: lambda: 1000 * beside_a_long_one(port, given.tokens)},
            given.rounds,
        )
        steps = step_ms(engines.loaded[0].model, CLIENTS, 3 * given.rounds)
    table = [["", "figure", "against one"]]
    for count, values in rates.items():
        table.append([f"{count} clients, tokens/s in all", shown(spread(values)), ratio(values, rates[1])])
    table.append(["a question of 4 tokens alone, ms", shown(spread(short[0]), 0), ""])
    table.append(["the same beside a long answer, ms", shown(spread(short[1]), 0), ratio(short[1], short[0])])
    for count, values in steps.items():
        table.append([f"a step of {count} rows, ms", shown(spread(values), 1), ratio(values, steps[1])])
    figures = {
        "tokens_per_s": {n: spread(values) for n, values in rates.items()},
        "short_ms": spread(short[0]), "short_beside_ms": spread(short[1]),
        "step_ms": {n: spread(values) for n, values in steps.items()},
    }  # fmt: skip
    report({"bundle": given.bundle.name, "tokens": given.tokens, **figures}, table, given.json)


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Of neighbours in time."""
    return shown(spread([value / one for value, one in zip(values, base, strict=True)]))


if __name__ == "__main__":
    main()
