"""What choosing a rest costs: prefills at K with a rest of one token and without one, in turn, in one process.

    python benchmarks/make_checkpoint.py 1b build/llava-1b
    vtx-export --model build/llava-1b --precision int8 --k 9,13 --out build/llava-1b-int8
    python benchmarks/rest_cost.py build/llava-1b-int8 --device cpu

One token more in the layers from K on is next to nothing, so the difference is the queries of layer K - 1, its score
and the choice. Every prefill is that of a new conversation; a round times both sides in either order, and the
picture's encoding is not counted.
"""

from __future__ import annotations

import numpy as np
from common import bundle_parser, report
from PIL import Image

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.tools.bench.series import shown, spread

QUESTION = "What is written on the sign beside the door, and who is named below it?"
SIDES = None, 1  # rests
ORDERS = (0, 1), (1, 0)


def prefill_ms(model: Model, picture: Image.Image, k: int, rest: int | None) -> float:
    """Milliseconds of the prefill of a new conversation, its picture encoded."""
    with model.open(picture) as conversation:
        return conversation.ask(QUESTION, k, rest=rest, max_new_tokens=1).stats.timings_ms["prefill"]


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--rounds", type=int, default=20)
    options = args.parse_args()
    pixels = np.random.default_rng(options.seed).integers(0, 256, (336, 336, 3), np.uint8)
    picture, table, figures = Image.fromarray(pixels), [["K", "no rest, ms", "rest of 1, ms", "cost, %"]], {}
    with load(options.bundle, device=options.device, threads=options.threads) as model:
        for k in model.manifest.variants:
            rounds = list[list[float]]()
            for number in range(options.rounds + 1):
                times = [0.0, 0.0]
                for side in (side for order in ORDERS for side in order):
                    times[side] += prefill_ms(model, picture, k, SIDES[side]) / len(ORDERS)
                if number:  # the first round warms up
                    rounds.append(times)
            without, rested = (spread([times[side] for times in rounds]) for side in range(2))
            cost = spread([100 * (times[1] / times[0] - 1) for times in rounds])
            table.append([str(k), shown(without), shown(rested), shown(cost)])
            figures[str(k)] = {"without_ms": without, "rested_ms": rested, "cost_percent": cost}
    report({"device": options.device, "threads": options.threads, "k": figures}, table, options.json)


if __name__ == "__main__":
    main()
