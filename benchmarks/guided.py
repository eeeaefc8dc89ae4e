"""What forced runs save under JSON schemas, in passes and time, and what masks take.

    python benchmarks/guided.py BUNDLE --schemas 100

Each question is answered with forced tokens in one pass and one at a time, in alternating order; the tokens must be
the same. Schemas are random ones, and two as programs have them. Seconds are those from an answer's first token to its
last; the processor's are those of the whole answer. Needs vtx-edge[guided].
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from common import bundle_parser, report
from schemas import random_schema

from vtx.runtime.api.load import load
from vtx.runtime.prompt.guiding import GuidedAnswer
from vtx.tools.bench.series import shown, spread

SHAPE = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "star", "triangle"]}, "colour": {"enum": ["red", "green", "blue"]},
        "size_px": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["shape", "colour", "size_px"], "additionalProperties": False,
}  # fmt: skip
AXIS = {"type": "integer", "minimum": -99, "maximum": 99}
COMMAND = {
    "type": "object",
    "properties": {
        "command": {"enum": ["move_to", "grasp", "release", "stop"]},
        "target": {
            "type": "object",
            "properties": {"x_mm": AXIS, "y_mm": AXIS, "z_mm": AXIS},
            "required": ["x_mm", "y_mm", "z_mm"], "additionalProperties": False,
        },
        "confidence_percent": {"type": "integer", "minimum": 0, "maximum": 100},
        "needs_confirmation": {"type": "boolean"},
    },
    "required": ["command", "target", "confidence_percent", "needs_confirmation"], "additionalProperties": False,
}  # fmt: skip
SETS: dict[str, Callable[[int], Any]] = {
    "random": lambda number: random_schema(Random(number)),
    "list of shapes": lambda _: {"type": "array", "items": SHAPE, "minItems": 1, "maxItems": 3},
    "command": lambda _: COMMAND,
}
FIGURES = ("passes", "s", "processor s")


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--schemas", type=int, default=100, help="of each kind [%(default)s]")
    args.add_argument("--max-new-tokens", type=int, default=96)
    given = args.parse_args()
    masks, mask, draft = list[float](), GuidedAnswer.mask, GuidedAnswer.draft

    def timed(self: GuidedAnswer, logits: Any) -> Any:
        start = time.process_time_ns()
        masked = mask(self, logits)
        masks.append((time.process_time_ns() - start) / 1000)
        return masked

    GuidedAnswer.mask = timed  # type: ignore[method-assign]
    picture = Path(__file__).parents[1] / "examples" / "scene-1.jpg"
    figures: dict[str, Any] = {}
    rows = [["schemas", "tokens", "forced", *(f"{name}, forced in one pass / one at a time" for name in FIGURES)]]
    with load(given.bundle, device=given.device, threads=given.threads) as model, model.open(picture) as image:
        for name, schema_of in SETS.items():
            sides: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
            tokens = forced = 0
            for number in range(given.seed, given.seed + given.schemas):
                schema, ids = schema_of(number), []
                settings = {
                    "temperature": float(number % 4 > 1),
                    "seed": number,
                    "max_new_tokens": given.max_new_tokens,
                }
                image.ask("Describe the shapes.", schema=schema, **{**settings, "max_new_tokens": 1})  # compiles it
                for together in (True, False) if number % 2 else (False, True):
                    GuidedAnswer.draft = draft if together else lambda *_: []  # type: ignore[method-assign]
                    start = time.process_time()
                    answer = image.ask("Describe the shapes.", schema=schema, **settings)
                    count, saved = len(answer.token_ids), answer.stats.forced or 0
                    seconds = answer.stats.timings_ms["decode_per_token"] * (count - 1) / 1000
                    sides[together].append((count - saved, seconds, time.process_time() - start))
                    ids.append(answer.token_ids)
                    tokens, forced = tokens + count * together, forced + saved
                if ids[0] != ids[1]:
                    sys.exit(f"{name} {number}: {ids[0]} with forced runs and {ids[1]} without, or the reverse")
            sums = {side: [sum(column) for column in zip(*values, strict=True)] for side, values in sides.items()}
            ratios = [
                spread(
                    [on[place] / off[place] for on, off in zip(sides[True], sides[False], strict=True) if off[place]]
                )
                for place in range(len(FIGURES))
            ]
            cells = [
                f"{on:.5g} / {off:.5g}; {shown(ratio)}"
                for on, off, ratio in zip(sums[True], sums[False], ratios, strict=True)
            ]
            rows.append([name, str(tokens), f"{forced / tokens:.0%}", *cells])
            figures[name] = {"tokens": tokens, "forced": forced, "together": sums[True], "one_at_a_time": sums[False],
                             "ratios": dict(zip(FIGURES, ratios, strict=True))}  # fmt: skip
    figures["masks_us"] = {str(p): float(np.percentile(masks, p)) for p in (50, 99, 100)}
    report(figures, rows, given.json)
    print("\nmasks, processor time: " + ", ".join(f"{p}%: {value:.0f} us" for p, value in figures["masks_us"].items()))


if __name__ == "__main__":
    main()
