"""Where the processor time of requests about pictures goes: tower, prompts, tokens, copies of K and V, and the rest.

    python -m benchmarks.request_parts                  the shape 1b, int8
    python -m benchmarks.request_parts --device cpu

Requests come at once to the scheduler in this process; seconds are the process's, all threads, of each request.
Pictures are decoded before. Run it from the root of the repository on a quiet machine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.common import parser, report
from benchmarks.pictures import picture
from benchmarks.serving import given_bundle, model_options

import vtx
from vtx.runtime.api.options import Settings
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine

PARTS = ("tower", "prompts", "tokens", "copies", "rest")
KINDS = {  # how many requests at once, and about how many pictures
    "a new picture, alone": (1, 1), "new pictures, 8 at once": (8, 8), "questions about one picture, 8 at once": (8, 1),
}  # fmt: skip


def main() -> None:
    args = parser(__doc__ or "")
    model_options(args)
    args.add_argument("--tokens", type=int, default=4, help="of an answer [%(default)s]")
    given = args.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with (
        vtx.load(given_bundle(given), device=given.device, compute=given.compute, threads=given.threads) as model,
        Engine("parts", model, Capacity(parallel=16, batch=16)) as engine,
    ):
        for number in range(given.rounds + 1):
            for place, (kind, (requests, pictures)) in enumerate(KINDS.items()):
                seed = 1000 * number + 100 * place
                spent = measured(engine, requests, [picture(seed + n) for n in range(pictures)], given.tokens)
                found[kind] += [spent] if number else []  # the first round warms up
        about = {"model": given.shape, "precision": given.precision, "device": model.backend.device}
    rows = [
        {**about, "kind": kind, **{part: median(spent[part] for spent in rounds) for part in (*PARTS, "all")}}
        for kind, rounds in found.items()
    ]
    table = [["seconds a request", *PARTS, "all"]]
    table += [[row["kind"], *(f"{row[part]:.3f}" for part in (*PARTS, "all"))] for row in rows]
    report({**about, "tokens": given.tokens, "rows": rows}, table, given.json)


def measured(engine: Engine, requests: int, pictures: list[str], tokens: int) -> dict[str, float]:
    """Seconds of processor time of each request, in each part and in all."""
    options = vtx.Options(max_new_tokens=tokens, ignore_eos=True)
    asked = list[tuple[int, list[AnswerRequest]]]()
    for number in range(requests):
        image = {"type": "image", "image": pictures[number % len(pictures)]}
        message = {"role": "user", "content": [image, {"type": "text", "text": f"question {number}?"}]}
        asked.append((number, [AnswerRequest.of_chat(engine.model.loaded, [message], Settings(None, options, "none"))]))
    with counted(engine.model) as spent:
        started = time.process_time()
        for _, answer in engine.answers(asked):
            if isinstance(answer, Exception):
                raise answer
        whole = time.process_time() - started
    parts = {part: spent[part] / requests for part in PARTS}
    return {**parts, "rest": (whole - spent.total()) / requests, "all": whole / requests}


@contextmanager
def counted(model: vtx.Model) -> Iterator[Counter[str]]:
    """The seconds that calls of the engine take within the block, by part; a call within another is a part of that."""
    spent = Counter[str]()
    inside = threading.local()
    backend = model.backend

    def counting(owner: Any, name: str, part: Callable[..., str]) -> Any:
        original = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            if getattr(inside, "call", False):
                return original(*given, **named)
            inside.call, started = True, time.process_time()
            try:
                return original(*given, **named)
            finally:
                inside.call = False
                spent[part(*given)] += time.process_time() - started

        return patch.object(owner, name, call)

    def of_several(_: int, caches: Any, tokens: Any, *__: Any) -> str:
        return "prompts" if len(tokens) > len(caches) else "tokens"

    with ExitStack() as patched:
        for name, part in {"vision": "tower", "embed": "tokens", "head": "tokens"}.items():
            patched.enter_context(counting(backend, name, lambda *_, part=part: part))
        if hasattr(backend, "append_each"):
            patched.enter_context(counting(backend, "append_each", of_several))
        for cache in {type(backend.stage(number, 8)) for number in range(len(model.manifest.stages))}:
            of_one: Callable[..., str] = lambda _, tokens, *__: "prompts" if len(tokens) > 1 else "tokens"  # noqa: E731
            patched.enter_context(counting(cache, "append", of_one))
            patched.enter_context(counting(cache, "copy", lambda *_: "copies"))
        yield spent


if __name__ == "__main__":
    main()
