"""Requests with a deadline under rising load: what share is kept, with K chosen by load and without.

    vtx-eval exact questions.jsonl --bundle BUNDLE --k none,17,9 --no-times --out judged
    python -m benchmarks.deadlines --bundle BUNDLE --report judged/report.json --rates 0.5,1,2,4

New pictures arrive at random (Poisson), at each rate for --seconds, first at a server with --adapt, then at one
without. Kept is an answer that is complete in time. `expected` is the mean figure of the chosen methods, by the report.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import parser, report
from benchmarks.pictures import arriving, picture
from benchmarks.serving import ANSWER_SECONDS, SERVE, running

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.host.machine import cores


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--bundle", type=Path, required=True)
    args.add_argument("--report", type=Path, required=True, help="of vtx-eval, about this bundle")
    args.add_argument("--drop", default="100", help="points that a method may be below the best [%(default)s]")
    args.add_argument("--deadline", type=int, default=400, help="milliseconds [%(default)s]")
    args.add_argument("--rates", default="0.5,1,2,4", help="requests a second [%(default)s]")
    args.add_argument("--seconds", type=float, default=20, help="at each rate [%(default)s]")
    args.add_argument("--tokens", type=int, default=4, help="of an answer [%(default)s]")
    args.add_argument("--device", default="auto")
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--work", type=Path, default=Path("build/serving"), help="logs [%(default)s]")
    given = args.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    common = [sys.executable, "-c", SERVE, "--bundle", f"model={given.bundle}", "--port", "0", "--device", given.device]
    common += ["--threads", str(given.threads), "--parallel", "8", "--queue", "64"]
    about = {"model": given.bundle.name, "precision": Bundle.open(given.bundle).manifest.precision}
    rows = list[dict[str, Any]]()
    rates = [float(rate) for rate in given.rates.split(",")]
    for name, words in {
        "chosen by load": ["--adapt", str(given.report), "--max-accuracy-drop", given.drop],
        "none": [],
    }.items():
        with running([*common, *words], given.work / "deadlines.log") as (port, _):
            fixed = {} if words else {"k": "none", "reduce": "none"}
            for n in range(3):
                asked(port, picture(n), given.tokens, 60_000, fixed)
            rows += [
                {**about, "method": name, "rate": rate, **under(port, rate, number, given, fixed)}
                for number, rate in enumerate(rates, 1)
            ]
    table = [["", "requests/s", "in time", "refused", "expected", "methods"]]
    for row in rows:
        methods = ", ".join(f"{name}: {count}" for name, count in row["methods"].items())
        expected = "" if row["expected"] is None else f"{row['expected']:.3f}"
        table.append(
            [row["method"], f"{row['rate']:g}", f"{row['kept']:.0%}", f"{row['refused']:.0%}", expected, methods]
        )
    report({"deadline_ms": given.deadline, "rows": rows}, table, given.json)


def under(port: int, rate: float, seed: int, given: Any, fixed: dict[str, Any]) -> dict[str, Any]:
    """Requests at this rate: the shares of those in time and refused at once, and what was chosen."""
    found = arriving(rate, given.seconds, seed, lambda image: asked(port, image, given.tokens, given.deadline, fixed))
    number = len(found)
    figures = [one["figure"] for one in found if one["figure"] is not None]
    return {
        "requests": number,
        "kept": sum(one["kept"] for one in found) / number,
        "refused": sum(one["status"] == 429 for one in found) / number,
        "expected": fmean(figures) if figures else None,
        "methods": dict(Counter(one["method"] for one in found if one["method"]).most_common()),
    }


def asked(port: int, image: str, tokens: int, deadline: int, fixed: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is this?"}]
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        sent = json.dumps(body | {"ignore_eos": True, "deadline_ms": deadline} | fixed)
        started = time.monotonic()
        connection.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
        response = connection.getresponse()
        reply = json.loads(response.read())
        late = 1000 * (time.monotonic() - started) > 1.1 * deadline  # the client's own time is in it
        vtx = reply["usage"]["vtx"] if response.status == 200 else {}
        adapted = vtx.get("adapted", {})
        return {
            "status": response.status,
            "kept": response.status == 200 and vtx["stopped"] != "timeout" and not late,
            "method": adapted.get("method"),
            "figure": adapted.get("figure"),
        }
    finally:
        connection.close()


if __name__ == "__main__":
    main()
