"""Guided answers under random JSON schemas: which end and validate, what forced runs save, and the time of masks.

    python benchmarks/guided.py BUNDLE --schemas 10000

Each schema is answered greedily and sampled. Needs vtx-edge[guided] and jsonschema.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
from common import parser, report
from schemas import random_schema

from vtx.runtime.api.load import load
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import GuidedAnswer


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("bundle", type=Path)
    args.add_argument("--schemas", type=int, default=10_000)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--max-new-tokens", type=int, default=128)
    args.add_argument("--device", default="auto")
    args.add_argument("--threads", type=int)
    given = args.parse_args()
    masks, mask = list[float](), GuidedAnswer.mask

    def timed(self: GuidedAnswer, logits: Any) -> Any:
        start = time.process_time_ns()
        masked = mask(self, logits)
        masks.append((time.process_time_ns() - start) / 1000)
        return masked

    GuidedAnswer.mask = timed  # type: ignore[method-assign]
    counts = dict.fromkeys(("answers", "ended", "invalid", "refused", "tokens", "forced"), 0)
    picture = Path(__file__).parents[1] / "examples" / "scene-1.jpg"
    with load(given.bundle, device=given.device, threads=given.threads) as model, model.open(picture) as image:
        for number in range(given.schemas):
            schema = random_schema(Random(given.seed + number))
            for temperature in (0.0, 1.0):
                settings = {"max_new_tokens": given.max_new_tokens, "temperature": temperature, "seed": number}
                try:
                    answer = image.ask("Describe the shapes.", schema=schema, **settings)
                except RequestError as e:
                    counts["refused"] += 1
                    print(f"schema {number}: {e}")
                    break
                counts["answers"] += 1
                counts["tokens"] += len(answer.token_ids)
                counts["forced"] += answer.stats.forced or 0
                if answer.stopped == "end":
                    counts["ended"] += 1
                    try:
                        jsonschema.validate(json.loads(answer.text), schema)
                    except (ValueError, jsonschema.ValidationError) as e:
                        counts["invalid"] += 1
                        print(f"schema {number}: {answer.text!r}: {str(e).splitlines()[0]}")
    percentiles = {f"mask, {p}%": float(np.percentile(masks, p)) for p in (50, 99, 100)}
    rows = [["", "number"], *([name, f"{count:,}"] for name, count in counts.items())]
    rows += [["passes saved", f"{counts['forced'] / max(1, counts['tokens']):.0%}"]]
    rows += [[name, f"{value:.0f} us of processor time"] for name, value in percentiles.items()]
    report({"counts": counts, "masks": percentiles}, rows, given.json)


if __name__ == "__main__":
    main()
