"""Time to the first token, the queue included, of requests about new pictures that arrive at random.

    python -m benchmarks.load                               vtx alone, at the shape 1b, int8, K = none and 9
    python -m benchmarks.load --llama BUILD/bin --no-amx    beside llama.cpp's server, from the same weights

At each rate new pictures arrive for --seconds (Poisson), the same ones at the same times for every side; one server
runs at a time. Times are the client's, from sending a request to the first piece of its answer. `--no-amx` keeps vtx
from AMX (ONEDNN_MAX_CPU_ISA), for a rival that is built without it. Run it from the root of the repository on a quiet
machine. `--llama` is as for benchmarks.serving.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import parser, report
from benchmarks.pictures import arriving, picture
from benchmarks.serving import (
    ANSWER_SECONDS,
    CONTEXT,
    free_port,
    given_bundle,
    made_gguf,
    model_options,
    running,
    serve_command,
)

PARALLEL = 8


def main() -> None:
    args = parser(__doc__ or "")
    model_options(args)
    args.add_argument("--rates", default="0.1,0.2,0.4,0.8", help="requests a second [%(default)s]")
    args.add_argument("--seconds", type=float, default=120, help="at each rate [%(default)s]")
    args.add_argument("--tokens", type=int, default=16, help="of an answer [%(default)s]")
    args.add_argument("--ks", default="none,9", help="of vtx [%(default)s]")
    args.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server and llama-quantize")
    args.add_argument("--no-amx", action="store_true", help="keep vtx from AMX")
    given = args.parse_args()
    bundle = given_bundle(given)
    rates = [float(rate) for rate in given.rates.split(",")]
    if given.no_amx:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    serve = [*serve_command(given, bundle, PARALLEL), "--queue", "512"]
    sides: dict[str, tuple[list[str], dict[str, Any]]] = {
        f"vtx-serve, K = {k}": (serve, {"k": k if k == "none" else int(k), "reduce": "none"})
        for k in given.ks.split(",")
    }
    if given.llama is not None:
        sides["llama.cpp's server"] = llama(given), {}
    about = {"model": given.shape, "precision": given.precision, "tokens": given.tokens, "amx": not given.no_amx}
    rows = list[dict[str, Any]]()
    for name, (command, extra) in sides.items():
        with running(command, given.work / "load.log") as (port, _):
            for n in range(2):
                asked(port, picture(n), given.tokens, extra)
            rows += [
                {**about, "side": name, "rate": rate, **under(port, rate, n, given, extra)}
                for n, rate in enumerate(rates, 1)
            ]
    table = [["", "requests/s", "requests", "failed", "first token, s: p50", "p99", "whole answer, s: p50", "p99"]]
    for row in rows:
        times = [f"{row[what][share]:.2f}" for what in ("first_s", "whole_s") for share in ("p50", "p99")]
        table.append([row["side"], f"{row['rate']:g}", str(row["requests"]), str(row["failed"]), *times])
    report({**about, "rows": rows}, table, given.json)


def llama(given: Any, context: int = CONTEXT) -> list[str]:
    """Continuous batching over as many conversations as vtx has, of `context` tokens each; the tower in float16."""
    from benchmarks.peers import gguf_files

    checkpoint = given.work / f"checkpoint-{given.shape}"
    port = free_port()
    model = made_gguf(given, checkpoint)
    tower = given.work / f"{given.shape}-mmproj.gguf"
    if not tower.exists():
        gguf_files.write_mmproj(checkpoint, tower, full=False)
    words = ["--model", model, "--mmproj", tower, "--host", "127.0.0.1", "--port", port, "--parallel", PARALLEL]
    words += ["--ctx-size", PARALLEL * context, "--threads", given.threads, "--threads-batch", given.threads, "--jinja"]
    return [str(given.llama / "llama-server"), *map(str, words)]


def under(port: int, rate: float, seed: int, given: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Requests at this rate: their number, those that failed, and the times of the others."""
    found = arriving(rate, given.seconds, seed, lambda image: asked(port, image, given.tokens, extra))
    times = [one for one in found if one is not None]
    if not times:
        raise RuntimeError(f"no request was answered at {rate:g} a second")
    return {
        "requests": len(found),
        "failed": len(found) - len(times),
        **{
            what: {"p50": float(np.quantile(values, 0.5)), "p99": float(np.quantile(values, 0.99))}
            for what, values in zip(("first_s", "whole_s"), zip(*times, strict=True), strict=True)
        },
    }


def asked(port: int, image: str, tokens: int, extra: dict[str, Any]) -> tuple[float, float] | None:
    """Seconds to the first piece of a streamed answer, and to its end; None if there was none."""
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is this?"}]
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **extra,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    with suppress(OSError, http.client.HTTPException), closing(connection):
        start = time.perf_counter()
        first = 0.0
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        while response.status == 200 and (line := response.readline()):
            delta = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
            if not first and delta and delta[0]["delta"].get("content"):
                first = time.perf_counter() - start
        return (first, time.perf_counter() - start) if first else None
    return None


if __name__ == "__main__":
    main()
