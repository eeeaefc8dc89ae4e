"""What K and a rest of the image cost: first token, token, second question, K and V; and what choosing the rest adds.

    python benchmarks/make_checkpoint.py 1b build/llava-1b
    vtx-export --model build/llava-1b --precision int8 --k 9,13 --out build/llava-1b-int8
    python benchmarks/rest_cost.py build/llava-1b-int8 --device cpu

Measured in turn, in one process: each K of the bundle and none, and the last K with a rest of 10%. Every round begins a
new conversation and asks twice; the picture's encoding is not counted. Choosing: prefills at the last K with a rest of
one token and without one. One token more in the layers from K on is next to nothing, so the difference is the queries
of layer K - 1, its score and the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from common import bundle_parser, report
from PIL import Image

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.tools.bench.series import shown, spread

QUESTIONS = "What is written on the sign beside the door, and who is named below it?", "Which colour is the sign?"
REST = "10%"
TOKENS = 17
ORDERS = (0, 1), (1, 0)
CHOOSING = None, 1  # rests


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds to the first tokens of both questions and for each further token; K and V after the first."""

    first: float
    token: float
    second: float
    kv_bytes: int


def ask_twice(model: Model, picture: Image.Image, k: int | None, rest: str | int | None) -> Times:
    """The times of a new conversation, its picture encoded."""
    with model.open(picture) as conversation:
        stats = [
            conversation.ask(question, k or "none", rest=rest, max_new_tokens=TOKENS).stats for question in QUESTIONS
        ]
    prefills = [answer.timings_ms["prefill"] for answer in stats]
    return Times(prefills[0], stats[0].timings_ms["decode_per_token"], prefills[1], stats[0].kv_bytes)


def pairs(variants: Sequence[int | None]) -> list[tuple[int | None, str | None]]:
    """K and rest of what is measured: every K without a rest, and the last one with it."""
    ks = sorted(k for k in variants if k is not None)
    return [(None, None), *((k, None) for k in ks), (ks[-1], REST)]


def choosing(model: Model, picture: Image.Image, k: int) -> list[float]:
    """Prefills at `k` without a rest and with a rest of one token, each the mean of both orders."""
    times = [0.0, 0.0]
    for side in (side for order in ORDERS for side in order):
        with model.open(picture) as conversation:
            stats = conversation.ask(QUESTIONS[0], k, rest=CHOOSING[side], max_new_tokens=1).stats
        times[side] += stats.timings_ms["prefill"] / len(ORDERS)
    return times


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--rounds", type=int, default=10)
    options = args.parse_args()
    pixels = np.random.default_rng(options.seed).integers(0, 256, (336, 336, 3), np.uint8)
    picture = Image.fromarray(pixels)
    with load(options.bundle, device=options.device, threads=options.threads) as model:
        measured = pairs(model.manifest.variants)
        rounds = [[ask_twice(model, picture, k, rest) for k, rest in measured] for _ in range(options.rounds + 1)][1:]
        deepest = measured[-1][0]
        sides = [choosing(model, picture, deepest) for _ in range(options.rounds)] if deepest else []
        compute = model.backend.compute
    table, figures = (
        [["K", "rest", "first token, ms", "token, ms", "second question, ms", "K and V, MB"]],
        list[object](),
    )
    for place, (k, rest) in enumerate(measured):
        times = [each[place] for each in rounds]
        spreads = [spread([getattr(one, name) for one in times]) for name in ("first", "token", "second")]
        row = [str(k or "none"), rest or "", *map(shown, spreads), f"{times[0].kv_bytes / 1e6:.1f}"]
        table.append(row)
        figures.append({"k": k, "rest": rest, "spreads": spreads, "kv_bytes": times[0].kv_bytes})
    cost = spread([100 * (rested / without - 1) for without, rested in sides])
    about = {"device": options.device, "threads": options.threads, "compute": compute}
    report({**about, "pairs": figures, "choosing_percent": cost}, table, options.json)
    print(f"\nchoosing adds {shown(cost)}% to a prefill at K = {deepest}, in {compute}")


if __name__ == "__main__":
    main()
