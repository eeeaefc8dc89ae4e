"""One process of one rival: convert a checkpoint, or load, answer and print one line of JSON.

python -m benchmarks.peers.worker prepare RIVAL PRECISION CHECKPOINT FOLDER
python -m benchmarks.peers.worker run RIVAL < work.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Answer, Result, Work

MARK = "RESULT "


def run(rival: Any, work: Work) -> Result:
    start = time.perf_counter()
    model = rival.load(Path(work.folder), work.precision, work.threads)
    loaded = time.perf_counter() - start
    cold = model.ask(work.warm, 2)
    first = model.ask(work.first, work.new_tokens)
    second = model.ask(work.second, 2)
    for answer, count in ((cold, 2), (first, work.new_tokens), (second, 2)):
        check(answer, count)
    installed = {found.name for found in metadata.distributions()}
    return Result(
        load=1000 * loaded,
        cold=1000 * cold.moments[0],
        first=1000 * first.moments[0],
        decode=1000 * (first.moments[-1] - first.moments[0]) / (work.new_tokens - 1),
        second=1000 * second.moments[0],
        rss=peak_rss(),
        vision=None if first.vision is None else 1000 * first.vision,
        ids=first.ids,
        versions={name: metadata.version(name) for name in rival.PACKAGES if name in installed},
        how=getattr(model, "how", ""),
    )


def check(answer: Answer, count: int) -> None:
    if len(answer.ids) != count or len(answer.moments) != count:
        raise ValueError(f"{len(answer.ids)} ids at {len(answer.moments)} moments, {count} were asked for")


def peak_rss() -> float:
    """MiB of the largest resident set so far; mapped files count, as far as they were read."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM; the comparison needs Linux")


def main() -> None:
    action, name, *rest = sys.argv[1:]
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    rival = importlib.import_module(f"benchmarks.peers.rivals.{name}")
    if action == "prepare":
        precision, checkpoint, folder = rest
        rival.prepare(Path(checkpoint), precision, Path(folder))
    else:
        result = run(rival, Work.from_json(sys.stdin.read()))
        print(MARK + json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
