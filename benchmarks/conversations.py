"""Memory of a conversation about a picture, at each K: K and V that are used, those that are held, and the process.

    python -m benchmarks.conversations BUNDLE [--device openvino] [--conversations 6]

Each K is a fresh process, which opens as many conversations, each about a picture of its own, and asks one question in
each. `used`: bytes of the filled slots; `held`: of the slots that are in memory, as vtx counts them; `process`: growth
of what is the process's alone (USS), from the second conversation to the last. `context`: if every layer held
`max_context` slots. Encoded pictures are not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
from benchmarks.common import bundle_parser, report
from PIL import Image

import vtx
from vtx.runtime.bundle.bundle import Bundle

MB = 1e6
QUESTION = "What is in this picture? Describe each thing, where it is, and how it relates to those next to it."


def measure(bundle: str, device: str, threads: int, k: int | None, conversations: int, tokens: int) -> dict[str, Any]:
    """Bytes of one conversation, mean of all but the first; runs in a process of its own."""
    options = vtx.Options(max_new_tokens=tokens, ignore_eos=True)
    rng, before, held = np.random.default_rng(0), 0, []
    with vtx.load(bundle, device=device, threads=threads) as model:
        slot, stages, process = model.backend.kv_slot_bytes, model.manifest.stages, psutil.Process()
        opened, used, encoded = [], 0, 0
        for number in range(conversations):
            picture = Image.fromarray(rng.integers(0, 256, (336, 336, 3), np.uint8))
            conversation = model.open(picture)
            answer = conversation.ask(QUESTION, k=k, options=options)
            opened.append(conversation)
            encoded = 4 * answer.stats.vision_tokens * model.manifest.model.hidden  # the image's tokens in float32
            held.append(conversation.cache_bytes - encoded)
            used = slot * (sum(answer.stats.kv_slots) + tokens * sum(stage.layers for stage in stages))
            if number == 0:
                before = process.memory_full_info().uss
        grown = (process.memory_full_info().uss - before) / (conversations - 1)
        whole = slot * model.manifest.max_context * sum(stage.layers for stage in stages)
    return {"used": used, "held": int(np.mean(held)), "process": grown - encoded, "context": whole}


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--conversations", type=int, default=6)
    args.add_argument("--tokens", type=int, default=32, help="of each answer")
    args.add_argument("--measure", metavar="K", help="measure one K in this process and print JSON")
    given = args.parse_args()
    if given.measure:
        k = None if given.measure == "none" else int(given.measure)
        found = measure(str(given.bundle), given.device, given.threads, k, given.conversations, given.tokens)
        print(json.dumps(found))
        return
    rows, table = [], [["K", "used, MB", "held, MB", "process, MB", "whole context, MB", "conversations a GB"]]
    for k in ("none", *map(str, sorted(Bundle.open(given.bundle).manifest.variants, reverse=True))):
        command = [sys.executable, "-m", "benchmarks.conversations", *sys.argv[1:], "--measure", k]
        found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        rows.append({"k": k, **found})
        values = [f"{found[name] / MB:.1f}" for name in ("used", "held", "process", "context")]
        table.append([k, *values, f"{1e9 / found['process']:.1f}"])
    report({"device": given.device, "tokens": given.tokens, "rows": rows}, table, given.json)


if __name__ == "__main__":
    main()
