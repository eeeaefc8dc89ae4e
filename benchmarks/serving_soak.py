"""A server under mixed load for minutes: is every answer the one that its question has alone, and does memory stay?

    python -m benchmarks.serving_soak BUNDLE --minutes 10 --bodies 500

First mutilated bodies, each of which must end in an answer or a refusal; then clients that ask at once, stream or not,
with and without pictures, at every K and reduction of the bundle, some with a seed, some of whom leave. Each answer is
compared with the one of the same question asked alone before. The server is a process of its own, whose resident memory
is shown. Ends with code 1 where an answer differs, a body ends in a status of 500, or memory grows by over --growth.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from benchmarks.common import bundle_parser, report
from benchmarks.serving import SERVE, running

from vtx.tools.data.scenes import draw, random_scene

MIB = 1 << 20
QUESTIONS = ("What is there?", "How many red shapes are there?", "What colour is the square?", "Where is the circle?")
INSERTED = (b"null", b"{}", b"[", b'"', b"1e999", b"-1", b"true", b",", b"\\u0000", b"\xff")
TOKENS = 12
POINTS = 40  # of the memory's curve


class Client:
    """Asks one server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and content of a reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def ids(self, body: dict[str, Any], *, stream: bool) -> list[int]:
        extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, content = self.post(json.dumps({**body, **extra}).encode())
        if status != 200:
            raise RuntimeError(f"status {status}: {content[:300]!r}")
        lines = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
        completion = json.loads(lines[-1] if stream else content)
        ids: list[int] = completion["usage"]["vtx"]["token_ids"]
        return ids

    def leave(self, body: dict[str, Any]) -> None:
        """Ask, and go away before the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        connection.close()


def picture(seed: int) -> str:
    out = io.BytesIO()
    draw(random_scene(random.Random(seed)), 224).save(out, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def bodies(described: dict[str, Any]) -> list[dict[str, Any]]:
    """Every question about every picture and none, at every setting of the bundle."""
    facts = described["vtx"]
    settings: list[dict[str, Any]] = [{"k": k, "reduce": "none"} for k in ("none", *facts["ks"])]
    settings += [{"k": "none", "reduce": spec} for spec in facts["reductions"]]
    settings += [{"k": "none", "reduce": "none", "temperature": 0.9, "seed": 7}]
    made = []
    for url in (None, *(picture(seed) for seed in range(3))):
        image = [] if url is None else [{"type": "image_url", "image_url": {"url": url}}]
        for question in QUESTIONS:
            message = {"role": "user", "content": [*image, {"type": "text", "text": question}]}
            base = {"model": "model", "messages": [message], "max_tokens": TOKENS, "ignore_eos": True}
            made += [{**base, **setting} for setting in settings]
    return made


def fuzz(client: Client, whole: bytes, count: int, seed: int) -> Counter[int]:
    """How often mutilated bodies ended in which status."""
    dice = random.Random(seed)
    statuses = Counter[int]()
    for _ in range(count):
        body = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            at = dice.randrange(len(body))
            kind = dice.randrange(4)
            if kind == 0:
                body[at] = dice.randrange(256)
            elif kind == 1:
                del body[at : at + dice.randint(1, 40)]
            elif kind == 2:
                body[at:at] = dice.choice(INSERTED)
            else:
                del body[at + 1 :]
        statuses[client.post(bytes(body))[0]] += 1
    return statuses


def soak(
    client: Client, process: psutil.Process, wanted: Sequence[tuple[dict[str, Any], list[int]]], given: Any
) -> tuple[Counter[str], list[list[float]]]:
    """What became of the requests, and [seconds, RSS in MiB] along the way."""
    dice = random.Random(given.seed)
    counts = Counter[str]()
    curve = list[list[float]]()
    start = time.monotonic()

    def ask(number: int) -> str:
        body, ids = wanted[number % len(wanted)]
        chance = random.Random(number).random()
        if chance < 0.1:
            client.leave(body)
            return "left"
        return "equal" if client.ids(body, stream=chance < 0.5) == ids else "different"

    with ThreadPoolExecutor(given.clients) as pool:
        while (spent := time.monotonic() - start) < 60 * given.minutes and counts.total() < given.requests:
            counts.update(pool.map(ask, [dice.randrange(1 << 30) for _ in range(8 * given.clients)]))
            if spent >= len(curve) * 60 * given.minutes / POINTS:
                curve.append([spent, process.memory_info().rss / MIB])
    return counts, curve


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--minutes", type=float, default=10)
    args.add_argument("--requests", type=int, default=sys.maxsize, help="at most, about [no limit]")
    args.add_argument("--bodies", type=int, default=500)
    args.add_argument("--clients", type=int, default=8)
    args.add_argument(
        "--growth", type=float, default=64, metavar="MIB", help="from a quarter of the time on [%(default)s]"
    )
    given = args.parse_args()
    command = [sys.executable, "-c", SERVE, "--bundle", f"model={given.bundle}", "--port", "0", "--kv-cache", "0.1"]
    command += ["--device", given.device, "--threads", str(given.threads), "--parallel", str(given.clients)]
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "log") as (port, process):
        client = Client(port)
        (described,) = client.get("/v1/models")["data"]
        asked = bodies(described)
        wanted = [(body, client.ids(body, stream=False)) for body in asked]
        statuses = fuzz(client, json.dumps(asked[-1]).encode(), given.bodies, given.seed)
        counts, curve = soak(client, psutil.Process(process), wanted, given)
    sizes = [size for _, size in curve]
    quarter = sizes[len(sizes) // 4]
    table = [
        ["", ""],
        ["mutilated bodies by status", ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))],
        ["requests", ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))],
        [
            "RSS at the start, after a quarter, at the end, most, MiB",
            ", ".join(f"{size:.0f}" for size in (sizes[0], quarter, sizes[-1], max(sizes))),
        ],
        ["answers that are decoded together", str(described["vtx"]["batch"])],
    ]
    report(
        {
            "model": given.bundle.name,
            "precision": described["vtx"]["precision"],
            "statuses": statuses,
            "requests": counts,
            "rss_mib": curve,
            "batch": described["vtx"]["batch"],
        },
        table,
        given.json,
    )
    if counts["different"] or any(status >= 500 for status in statuses) or max(sizes) - quarter > given.growth:
        sys.exit("failed")


if __name__ == "__main__":
    main()
