"""Memory of a conversation about a picture, at each K: K and V that are used, those that are held, and the process.

    python -m benchmarks.conversations BUNDLE [--device openvino] [--conversations 6] [--one-picture]

Each K is a fresh process, which opens as many conversations, each about a picture of its own, or all about one, and
asks one question in each. Bytes are those of a conversation, mean of all but the first. `used`: of the filled slots;
`held`: of the slots that are in memory, as vtx counts them; `process`: growth of what is the process's alone (USS).
`context`: if every layer held `max_context` slots. Encoded pictures are not counted.
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
from vtx.runtime.backends.backend import BatchBackend
from vtx.runtime.bundle.bundle import Bundle

MB = 1e6
QUESTION = "What is in this picture? Describe each thing, where it is, and how it relates to those next to it."


def measure(given: Any, k: int | None) -> dict[str, Any]:
    """Bytes of one conversation, mean of all but the first; runs in a process of its own."""
    options = vtx.Options(max_new_tokens=given.tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    before = 0
    opened = list[vtx.Conversation]()
    used = 0
    encoded = 0
    with vtx.load(given.bundle, device=given.device, threads=given.threads) as model:
        slot = model.backend.kv_slot_bytes
        stages = model.manifest.stages
        process = psutil.Process()
        if given.one_picture:
            assert isinstance(model.backend, BatchBackend)
            model.backend.share_caches(given.conversations)
        picture = Image.fromarray(rng.integers(0, 256, (336, 336, 3), np.uint8))
        first = 0
        for number in range(given.conversations):
            if not given.one_picture:
                picture = Image.fromarray(rng.integers(0, 256, (336, 336, 3), np.uint8))
            conversation = model.open(picture)
            if opened and given.one_picture:
                conversation.share_prefix(opened[0])
            answer = conversation.ask(f"{number}: {QUESTION}", k=k, options=options)
            opened.append(conversation)
            used = slot * (sum(answer.stats.kv_slots) + given.tokens * sum(len(stage.cached) for stage in stages))
            if number == 0:
                before = process.memory_full_info().uss
                first = held_slots(conversation)
                encoded = 0 if given.one_picture else 4 * answer.stats.vision_tokens * model.manifest.model.hidden
        more = given.conversations - 1
        held = slot * (sum(map(held_slots, opened)) - first) / more
        grown = (process.memory_full_info().uss - before) / more - encoded  # the image's tokens are float32
        whole = slot * model.manifest.max_context * sum(len(stage.cached) for stage in stages)
        about = {"model": given.bundle.name, "precision": model.manifest.precision, "device": model.backend.device}
    return {**about, "used": used, "held": held, "process": grown, "context": whole}


def held_slots(conversation: vtx.Conversation) -> float:
    """Slots in memory, of all layers; of those that it shares its part."""
    caches = conversation.prefix_caches
    segments = caches.segments.items()
    return sum(segment.cache.resident * len(caches.stages[number].cached) for (number, _), segment in segments)


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--conversations", type=int, default=6)
    args.add_argument("--tokens", type=int, default=32, help="of each answer")
    args.add_argument("--one-picture", action="store_true", help="all about one picture, whose K and V they share")
    args.add_argument("--measure", metavar="K", help="measure one K in this process and print JSON")
    given = args.parse_args()
    if given.measure:
        print(json.dumps(measure(given, None if given.measure == "none" else int(given.measure))))
        return
    rows = []
    table = [["K", "used, MB", "held, MB", "process, MB", "whole context, MB", "conversations per GB"]]
    for k in ("none", *map(str, sorted(Bundle.open(given.bundle).manifest.variants, reverse=True))):
        command = [sys.executable, "-m", "benchmarks.conversations", *sys.argv[1:], "--measure", k]
        found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        rows.append({"k": k, **found})
        values = [f"{found[name] / MB:.1f}" for name in ("used", "held", "process", "context")]
        table.append([k, *values, f"{1e9 / found['process']:.1f}"])
    report({"device": given.device, "tokens": given.tokens, "rows": rows}, table, given.json)


if __name__ == "__main__":
    main()
