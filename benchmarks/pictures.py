"""Processor time of a request to vtx-serve: text, a new picture each, and questions about one picture at the same time.

    python -m benchmarks.pictures                                  the shape 1b, int8
    python -m benchmarks.pictures --other ../before/.venv/bin/python     beside another installation of vtx

Each server holds the model at the same time, and they are asked in turn. Seconds are those of the server's process, all
threads, over the number of requests. Run it from the root of the repository on a quiet machine.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import psutil
from benchmarks.common import parser, report
from benchmarks.serving import ANSWER_SECONDS, SERVE, given_bundle, model_options, running
from PIL import Image

CLIENTS = (1, 4, 8, 16)
SIDE = 336


def main() -> None:
    args = parser(__doc__ or "")
    model_options(args)
    given = args.parse_args()
    bundle = given_bundle(given)
    words = ["-c", SERVE, "--port", "0", "--parallel", "16", "--max-batch", "16"]
    words += ["--timeout", str(int(ANSWER_SECONDS))]
    words += ["--threads", str(given.threads), "--device", given.device]
    words += ["--compute", given.compute] if given.compute else []
    sides = {"vtx": (Path(sys.executable), bundle)}
    if given.other:
        sides[given.other_name] = given.other, given.other_bundle or bundle
    found: dict[tuple[str, str, int], list[float]] = {}
    with ExitStack() as servers:
        ports = {}
        for name, (python, its_bundle) in sides.items():
            command = [str(python), *words, "--bundle", f"model={its_bundle}"]
            ports[name] = servers.enter_context(running(command, given.work / f"pictures-{name}.log"))
            ask(ports[name][0], "warm", 2, picture(0))
        for number in range(given.rounds):
            for clients in CLIENTS:
                for kind in KINDS:
                    for name, (port, pid) in ports.items():
                        seconds = measured(port, pid, kind, clients, 1000 * number + clients)
                        found.setdefault((name, kind, clients), []).append(seconds / clients)
    rows = [
        {
            "installation": name,
            "kind": kind,
            "clients": clients,
            "model": given.shape,
            "precision": given.precision,
            "cpu_s_a_request": round(median(values), 4),
            "rounds": [round(value, 4) for value in values],
        }
        for (name, kind, clients), values in found.items()
    ]
    table = [["", *(f"{clients} clients" for clients in CLIENTS)]]
    for name in sides:
        for kind in KINDS:
            values = (found[name, kind, clients] for clients in CLIENTS)
            table.append([f"{name}: {kind}", *(f"{median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in values)])
    report({"rows": rows}, table, given.json)


def picture(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


T = TypeVar("T")


def arriving(rate: float, seconds: float, seed: int, send: Callable[[str], T]) -> list[T]:
    """What `send` gives for new pictures that arrive at random at this rate (Poisson), each sent by a thread."""
    rng = np.random.default_rng(seed)
    found = list[T]()
    threads = list[threading.Thread]()
    at = time.monotonic()
    for n in range(max(1, round(rate * seconds))):
        image = picture(100_000 * seed + n)
        at += float(rng.exponential(1 / rate))
        time.sleep(max(0.0, at - time.monotonic()))
        threads.append(threading.Thread(target=lambda image=image: found.append(send(image))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


def ask(port: int, question: str, tokens: int, image: str | None = None) -> None:
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        sent = json.dumps(body | {"ignore_eos": True, "k": "none"})
        connection.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
        response.read()
    finally:
        connection.close()


# What client `n` of a round with this seed asks.
KINDS: dict[str, Callable[[int, int, int], None]] = {
    "text, 32 tokens": lambda port, seed, n: ask(port, f"question {seed} {n}: what is this?", 32),
    "a new picture, 4 tokens": lambda port, seed, n: ask(port, f"what is this? {n}", 4, picture(10 * seed + n)),
    "a new picture, 32 tokens": lambda port, seed, n: ask(
        port, f"what is that? {n}", 32, picture(10 * seed + n + 5_000_000)
    ),
    "one new picture, 4 tokens": lambda port, seed, n: ask(port, f"question {n}?", 4, picture(10 * seed + 9_000_000)),
}


def measured(port: int, pid: int, kind: str, clients: int, seed: int) -> float:
    """Seconds of the server's processor time for one request of each client, sent at the same time."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(partial(KINDS[kind], port, seed), range(clients)))
    after = process.cpu_times()
    return (after.user - before.user) + (after.system - before.system)


if __name__ == "__main__":
    main()
