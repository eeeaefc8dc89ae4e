"""What K and a rest of the image cost: first token, token, second question, K and V; and what choosing the rest adds.

    python benchmarks/make_checkpoint.py 1b build/llava-1b
    vtx-export --model build/llava-1b --precision int8 --k 9,13 --out build/llava-1b-int8
    python benchmarks/rest_cost.py build/llava-1b-int8 --device cpu

Measured in turn, in one process: each K of the bundle and none, and the last K with a rest of 10%. Every round begins a
new conversation and asks twice; the picture's encoding is not counted.

Choosing, in processor time: questions at the last K without a rest, without one but with the image's hidden states at
K held, and with a rest of one token. Where nothing is to be held, an engine may leave out the feed-forward of layer
K - 1 for the image: the second and the first differ by that. The third and the second differ by the queries of layer
K - 1, its score and the choice, as one token more in the layers from K on is next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from common import bundle_parser, report
from PIL import Image

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.policies.base import Policy
from vtx.runtime.session.caches import PrefixCaches
from vtx.tools.bench.series import shown, spread

QUESTIONS = "What is written on the sign beside the door, and who is named below it?", "Which colour is the sign?"
REST = "10%"
TOKENS = 17
PLAIN, HELD, RESTED = range(3)


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


@contextmanager
def held() -> Iterator[None]:
    """Questions within hold the image's hidden states at their K, as a rest needs them."""
    prepare = PrefixCaches.prepare

    def holding(caches: PrefixCaches, policy: Policy) -> None:
        caches.holding |= {number for number, stage in enumerate(caches.stages) if stage.first == policy.exit}
        prepare(caches, policy)

    PrefixCaches.prepare = holding  # type: ignore[method-assign, assignment]
    yield
    PrefixCaches.prepare = prepare  # type: ignore[method-assign]


def question_time(model: Model, picture: Image.Image, k: int, rest: int | None) -> float:
    """Processor milliseconds of a question in a new conversation, with the picture's encoding, to its first token."""
    with model.open(picture) as conversation:
        begin = time.process_time()
        conversation.ask(QUESTIONS[0], k, rest=rest, max_new_tokens=1)
        return 1e3 * (time.process_time() - begin)


def choosing(model: Model, picture: Image.Image, k: int, number: int) -> list[float]:
    """The times of round `number` by PLAIN, HELD and RESTED; every second round goes through them backwards."""
    times = [0.0, 0.0, 0.0]
    for side in (PLAIN, HELD, RESTED)[:: 1 if number % 2 else -1]:
        if side == HELD:
            with held():
                times[side] = question_time(model, picture, k, None)
        else:
            times[side] = question_time(model, picture, k, 1 if side == RESTED else None)
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
        sides = [choosing(model, picture, deepest, number) for number in range(options.rounds)] if deepest else []
        compute = model.backend.compute
    table = [["K", "rest", "first token, ms", "token, ms", "second question, ms", "K and V, MB"]]
    figures = list[object]()
    for place, (k, rest) in enumerate(measured):
        times = [each[place] for each in rounds]
        spreads = [spread([getattr(one, name) for one in times]) for name in ("first", "token", "second")]
        row = [str(k or "none"), rest or "", *map(shown, spreads), f"{times[0].kv_bytes / 1e6:.1f}"]
        table.append(row)
        figures.append({"k": k, "rest": rest, "spreads": spreads, "kv_bytes": times[0].kv_bytes})
    holding = spread([100 * (times[HELD] / times[PLAIN] - 1) for times in sides])
    choice = spread([100 * (times[RESTED] / times[HELD] - 1) for times in sides])
    about = {"device": options.device, "threads": options.threads, "compute": compute}
    report({**about, "pairs": figures, "holding_percent": holding, "choosing_percent": choice}, table, options.json)
    print(
        f"\nat K = {deepest}, in {compute}: the image's hidden states add {shown(holding)}%, choosing {shown(choice)}%"
    )


if __name__ == "__main__":
    main()
