"""Tokens per second of 1, 2, 4 and 8 conversations at a time: vtx-serve decoding them together, vtx-serve decoding them
in turn, and llama.cpp's server where its programs are given. And what a short question waits beside a long answer.

    python -m benchmarks.serving                            vtx alone, at the shape 1b, int8
    python -m benchmarks.serving --llama BUILD/bin          beside llama.cpp's server, from the same weights

All servers hold the model at the same time and are asked in turn; each round is kept in --work, and the same command
goes on after the last one. No round begins after --minutes. Run it from the root of the repository. `--llama` is a
folder with llama-server and llama-quantize; their source is part of llama-cpp-python's source distribution
(vendor/llama.cpp). The conversion takes the gguf package.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import parser, report
from benchmarks.make_checkpoint import SHAPES, write_config, write_tokenizer, write_weights

from vtx.runtime.host.machine import cores
from vtx.tools.bench.series import shown, spread
from vtx.tools.data.journal import ResultJournal

CLIENTS = (1, 2, 4, 8)
CONTEXT = 1024  # slots of a conversation
WAIT_SECONDS = 600.0  # for a server to load
ANSWER_SECONDS = 1200.0  # other work on the machine does not change processor time
GGUF = {"int8": "q8_0", "int4": "q4_0"}
TOGETHER = "vtx-serve, together"
IN_TURN = "vtx-serve, in turn"
LLAMA = "llama.cpp's server"
SERVE = "from vtx.cli import serve; serve()"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' + message['content'] + ' ' }}{% endfor %}ASSISTANT:"
)


def main() -> None:
    given = arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    checkpoint = made_checkpoint(given.work / f"checkpoint-{given.shape}", given.shape)
    commands = vtx_commands(
        given, made_bundle(given.work / f"bundle-{given.shape}-{given.precision}", checkpoint, given)
    )
    if given.llama is not None:
        commands[LLAMA] = llama_command(given, made_gguf(given, checkpoint))
    about = {
        "model": given.shape,
        "precision": given.precision,
        "device": given.device,
        "compute": given.compute,
        "threads": given.threads,
        "tokens": given.tokens,
        "sides": list(commands),
    }
    with ResultJournal(given.work / "serving.jsonl", about) as journal:
        if len(journal.results) < given.rounds:
            measure(commands, journal, given)
        rounds = list(journal.results.values())
    if not rounds:
        sys.exit("no round was finished; give it more --minutes")
    show(about, rounds, list(commands), given.json)


def arguments() -> argparse.Namespace:
    args = parser(__doc__ or "")
    args.add_argument("--shape", choices=list(SHAPES), default="1b")
    args.add_argument("--precision", choices=list(GGUF), default="int8")
    args.add_argument("--device", default="auto", help="of vtx [%(default)s]")
    args.add_argument("--compute", help="of vtx [its default]")
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--tokens", type=int, default=32, help="of an answer [%(default)s]")
    args.add_argument("--rounds", type=int, default=5, help="in all, those of an earlier run included [%(default)s]")
    args.add_argument("--minutes", type=float, default=12, help="no round begins after these [%(default)s]")
    args.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server and llama-quantize")
    args.add_argument("--work", type=Path, default=Path("build/serving"), help="models, and rounds [%(default)s]")
    given = args.parse_args()
    given.work = given.work.resolve()
    return given


# ---- models --------------------------------------------------------------------------------------


def model_options(args: argparse.ArgumentParser) -> None:
    """The options of a benchmark that makes its bundle, and of what runs it."""
    args.add_argument("--shape", choices=list(SHAPES), default="1b")
    args.add_argument("--precision", default="int8")
    args.add_argument("--device", default="auto")
    args.add_argument("--compute")
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--other", type=Path, help="the Python of another installation of vtx")
    args.add_argument("--other-name", default="other", help="in the tables [%(default)s]")
    args.add_argument("--other-bundle", type=Path, help="of that installation, if it reads another format")
    args.add_argument("--bundle", type=Path, help="a bundle in place of one of --shape")
    args.add_argument("--work", type=Path, default=Path("build/serving"), help="models [%(default)s]")


def serve_command(given: argparse.Namespace, bundle: Path, parallel: int) -> list[str]:
    """vtx-serve over a bundle, as `model_options` say, for as many answers at a time."""
    words = [sys.executable, "-c", SERVE, "--bundle", f"model={bundle}", "--port", "0", "--parallel", parallel]
    words += ["--max-batch", parallel, "--timeout", int(ANSWER_SECONDS), "--threads", given.threads]
    words += ["--device", given.device, *(["--compute", given.compute] if given.compute else [])]
    return [str(word) for word in words]


def given_bundle(given: argparse.Namespace) -> Path:
    """The bundle that these options name, made where there is none yet."""
    given.work.mkdir(parents=True, exist_ok=True)
    if given.bundle is not None:
        return Path(given.bundle)
    checkpoint = made_checkpoint(given.work / f"checkpoint-{given.shape}", given.shape)
    return made_bundle(given.work / f"bundle-{given.shape}-{given.precision}", checkpoint, given)


def made_checkpoint(folder: Path, shape: str) -> Path:
    if not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(exist_ok=True)
        write_config(folder, SHAPES[shape])
        write_tokenizer(folder, SHAPES[shape])
        write_weights(folder, SHAPES[shape])
    return folder


def made_bundle(folder: Path, checkpoint: Path, given: argparse.Namespace) -> Path:
    if not (folder / "vtx.json").exists():
        words = ["--model", str(checkpoint), "--out", str(folder), "--precision", given.precision, "--k", "9"]
        program = "from vtx.cli import export; export()"
        subprocess.run([sys.executable, "-c", program, *words, "--max-context", str(CONTEXT)], check=True)
    return folder


def made_gguf(given: argparse.Namespace, checkpoint: Path) -> Path:
    kind = GGUF[given.precision]
    made, plain, partial = (given.work / f"{given.shape}-{name}.gguf" for name in (kind, "f16", "partial"))
    if not made.exists():
        from benchmarks.peers import gguf_files

        gguf_files.write_text(checkpoint, plain, full=False, template=TEMPLATE)
        subprocess.run([given.llama / "llama-quantize", plain, partial, kind], check=True, stdout=subprocess.DEVNULL)
        plain.unlink()
        partial.rename(made)
    return made


# ---- servers -------------------------------------------------------------------------------------


def vtx_commands(given: argparse.Namespace, bundle: Path) -> dict[str, list[str]]:
    most = str(max(CLIENTS))
    common = [sys.executable, "-c", SERVE, "--bundle", f"model={bundle}", "--port", "0", "--parallel", most]
    common += ["--threads", str(given.threads), "--device", given.device]
    common += ["--compute", given.compute] if given.compute else []
    return {TOGETHER: [*common, "--max-batch", most], IN_TURN: [*common, "--max-batch", "1"]}


def llama_command(given: argparse.Namespace, model: Path) -> list[str]:
    """Continuous batching over as many conversations; its default is one slot's cache for each of them."""
    most = max(CLIENTS)
    port = free_port()
    words = ["--model", model, "--host", "127.0.0.1", "--port", port, "--parallel", most, "--ctx-size", most * CONTEXT]
    words += ["--threads", given.threads, "--threads-batch", given.threads, "--jinja"]
    return [str(given.llama / "llama-server"), *map(str, words)]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as at:
        port: int = at.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[tuple[int, int]]:
    """The port and process id of a server that answers, ended with the block."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            yield port_of(server, command, log), server.pid
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def port_of(server: subprocess.Popen[bytes], command: Sequence[str], log: Path) -> int:
    """Its port, once it answers."""
    end = time.monotonic() + WAIT_SECONDS
    told = int(command[command.index("--port") + 1])
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        port = told or (int(found[1]) if found else 0)
        if port and answers(port):
            return port
        time.sleep(0.5)
    raise RuntimeError(f"{Path(command[0]).name} did not start; {log} says: {log.read_text(errors='replace')[-500:]}")


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# ---- asking --------------------------------------------------------------------------------------


def ask(port: int, question: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first piece of a streamed answer of exactly `tokens`, and to its end."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        start = time.perf_counter()
        first = 0.0
        usage = None
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter()
            usage = json.loads(line[6:]).get("usage") or usage
        end = time.perf_counter()
    finally:
        connection.close()
    if usage is None or usage["completion_tokens"] != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for, the answer's usage is {usage}")
    return first - start, end - start


def question(number: int) -> str:
    """One of which no server knows the beginning."""
    return f"{time.time_ns()} {number}: what is there to see?"


def side_by_side(port: int, clients: int, tokens: int) -> float:
    """Tokens per second of all clients together, prompts included."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda number: ask(port, question(number), tokens), range(clients)))
    return clients * tokens / (time.perf_counter() - start)


def beside_a_long_one(port: int, tokens: int) -> float:
    """Seconds to the end of an answer of 4 tokens while one of `tokens` runs."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, port, question(0), tokens)
        time.sleep(0.5)
        _, seconds = ask(port, question(1), 4)
        long.result()
    return seconds


# ---- rounds --------------------------------------------------------------------------------------


def measure(commands: dict[str, list[str]], journal: ResultJournal, given: argparse.Namespace) -> None:
    """Rounds until there are enough, or until the time is over."""
    end = time.monotonic() + 60 * given.minutes
    with ExitStack() as stack:
        ports = {}
        for number, (side, command) in enumerate(commands.items()):
            ports[side], _ = stack.enter_context(running(command, given.work / f"server-{number}.log"))
            ask(ports[side], question(0), 4)  # warms up
        while len(journal.results) < given.rounds and time.monotonic() < end:
            number = len(journal.results)
            journal.add({f"round {number}": one_round(ports, number, given.tokens)})
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)


def one_round(ports: dict[str, int], number: int, tokens: int) -> dict[str, Any]:
    """Every side with every number of clients, each side beginning in its turn."""
    sides = list(ports)
    order = [*sides[number % len(sides) :], *sides[: number % len(sides)]]
    rates: dict[str, dict[str, float]] = {side: {} for side in sides}
    for clients in CLIENTS:
        for side in order:
            rates[side][str(clients)] = side_by_side(ports[side], clients, tokens)
    short = {side: [ask(ports[side], question(0), 4)[1], beside_a_long_one(ports[side], 2 * tokens)] for side in order}
    return {"tokens_per_s": rates, "short_s": short}


def show(about: dict[str, Any], rounds: Sequence[dict[str, Any]], sides: Sequence[str], target: Path | None) -> None:
    def of(side: str, clients: int) -> list[float]:
        return [one["tokens_per_s"][side][str(clients)] for one in rounds]

    table = [["", *sides]]
    for clients in CLIENTS:
        table.append([f"{clients} at a time, tokens/s", *(shown(spread(of(side, clients)), 1) for side in sides)])
    for clients in CLIENTS[1:]:
        table.append([f"{clients} at a time, by one", *(ratio(of(side, clients), of(side, 1)) for side in sides)])
    for clients in CLIENTS:
        in_turn = of(IN_TURN, clients)
        table.append([f"{clients} at a time, by vtx in turn", *(ratio(of(side, clients), in_turn) for side in sides)])
    for place, what in enumerate(("4 tokens alone, s", "4 tokens beside a long answer, s")):
        times: Callable[[str], list[float]] = lambda side, place=place: [r["short_s"][side][place] for r in rounds]  # noqa: E731
        table.append([what, *(shown(spread(times(side))) for side in sides)])
    print(f"{about}, {len(rounds)} rounds\n")
    report({**about, "rounds": rounds}, table, target)


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Of neighbours in time."""
    return shown(spread([value / one for value, one in zip(values, base, strict=True)]))


if __name__ == "__main__":
    main()
