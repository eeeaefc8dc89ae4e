"""Random JSON schemas, and guided answers under them: do the Python runtime, the server and libvtx give the same
tokens, and does every answer that ended validate?

    python -m benchmarks.schemas --count 10000 --seed 0

Each schema is asked of one of three bundles, greedily or sampled: the demo, and two with random weights, whose
tokenizers and attention differ. The server gets --clients requests at once and decodes them together. Results lie in
--work in chunks, and the same command resumes there. `--suite FOLDER` asks under the schemas of the
JSON-Schema-Test-Suite, too, e.g. json/tests/draft2020-12 of the source distribution of jsonschema. Needs
vtx-edge[guided,serve], jsonschema and `make cpp`. Ends with code 1 where answers differ or complete ones do not
validate.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

KEYS = ("a", "shape", "count", "is_red", "Größe", 'quo"te', "k")
WORDS = ("red", "circle", "", "é", "a b", "\n", 'x"y', "\\", "日本")
SIMPLE = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "bounds", "types")
NESTED = ("array", "tuple", "object", "object", "map", "anyOf", "allOf", "ref")
QUESTION = "Describe the shapes."
TOKENS = 96
CHUNK = 100


class Case(NamedTuple):
    """A question under a schema; its number is the sampling's seed."""

    number: int
    bundle: str
    schema: Any
    temperature: float


class Said(NamedTuple):
    """`stopped` is an answer's, or "refused"."""

    ids: tuple[int, ...]
    stopped: str
    text: str
    forced: int | None = None  # not known of the server


Way = Callable[[Sequence[Case]], list[Said]]


def random_schema(rng: Random, depth: int = 3) -> dict[str, Any]:
    """A schema nested at most `depth` deep; most of its answers are short."""
    kind = rng.choice(SIMPLE if depth == 0 else (*SIMPLE, *NESTED))
    low = rng.randint(0, 3)

    def nested() -> dict[str, Any]:
        return random_schema(rng, depth - 1)

    if kind == "string":
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": 10 * low - 20, "maximum": 10 * low - 20 + rng.randint(0, 300)}
    if kind == "number":
        return {"type": "number", "minimum": rng.randint(-5, 0), "maximum": rng.randint(1, 5)}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, "a"], {"a": 1}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 0, False, {"k": [None]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{4}-[0-9]{2}$", "é|/x"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}
    if kind == "bounds":
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 40, "multipleOf": low + 1}
    if kind == "types":
        return {"type": rng.sample(["boolean", "null", "integer"], rng.randint(1, 3)), "maximum": 99, "minimum": 0}
    if kind == "array":
        return {"type": "array", "items": nested(), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "tuple":
        parts = [nested() for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "object":
        names = rng.sample(KEYS, rng.randint(0, 4))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: nested() for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "map":
        patterns = {"^[xy]$": nested()} if rng.random() < 0.5 else {}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": nested(), "maxProperties": low}
    if kind == "anyOf":
        return {"anyOf": [nested() for _ in range(rng.randint(1, 3))]}
    if kind == "allOf":
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": 30 * low}]}
    if kind == "ref":
        tree = {
            "type": "object",
            "properties": {"v": random_schema(rng, 0), "next": {"$ref": "#/$defs/tree"}},
            "required": ["v"],
            "additionalProperties": False,
        }
        # A reference from the root only: nested schemas of this generator have no root of their own.
        return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}} if depth == 3 else {"type": "null"}
    return {"type": kind}


def cases(first: int, count: int, bundles: Sequence[str], fixed: Sequence[Any] = ()) -> list[Case]:
    """Cases from number `first` on, of random schemas, or of the `fixed` ones."""
    return [
        Case(
            n, bundles[n % len(bundles)], fixed[n] if fixed else random_schema(Random(n)), float(n // len(bundles) % 2)
        )
        for n in range(first, first + count)
    ]


def by_python(images: Mapping[str, Any]) -> Way:
    """`images`: a conversation of each bundle."""
    from vtx.runtime.errors import RequestError

    def ask(case: Case) -> Said:
        sampling: dict[str, Any] = {"temperature": case.temperature, "seed": case.number}
        try:
            answer = images[case.bundle].ask(QUESTION, schema=case.schema, max_new_tokens=TOKENS, **sampling)
        except RequestError:
            return Said((), "refused", "")
        return Said(answer.token_ids, answer.stopped, answer.text, answer.stats.forced)

    return lambda asked: list(map(ask, asked))


def by_server(chat: Callable[[Any], Any], message: Mapping[str, Any], clients: int) -> Way:
    """`chat` posts a body; `clients` do so at once."""

    def ask(case: Case) -> Said:
        body = {"model": case.bundle, "messages": [message], "max_tokens": TOKENS, "guided_json": case.schema}
        reply = chat({**body, "temperature": case.temperature, "seed": case.number})
        if reply.status != 200:
            return Said((), "refused" if reply.status == 400 else f"status {reply.status}", "")
        choice = reply.json["choices"][0]
        usage = reply.json["usage"]["vtx"]
        stopped = {"stop": "end"}.get(choice["finish_reason"], choice["finish_reason"])
        return Said(tuple(usage["token_ids"]), stopped, choice["message"]["content"])

    def ask_all(asked: Sequence[Case]) -> list[Said]:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(ask, asked))

    return ask_all


def by_libvtx(conversations: Mapping[str, Callable[..., dict[str, Any]]]) -> Way:
    """`conversations`: what asks each bundle, with the fields of `vtx_ask_options` as keywords."""

    def ask(case: Case) -> Said:
        guide = {"guide_kind": b"schema", "guide": json.dumps(case.schema).encode()}
        sampling = {"temperature": case.temperature, "has_seed": 1, "seed": case.number}
        try:
            facts = conversations[case.bundle](QUESTION, max_new_tokens=TOKENS, **guide, **sampling)
        except AssertionError:
            return Said((), "refused", "")
        return Said(tuple(facts["token_ids"]), facts["stopped"], facts["text"], facts["forced"])

    return lambda asked: list(map(ask, asked))


def compared(asked: Sequence[Case], ways: Mapping[str, Way]) -> tuple[Counter[str], list[str]]:
    """Counts of the first way's answers; and faults: another way's differs, or a complete one does not validate."""
    import jsonschema

    counts = Counter[str]()
    faults = list[str]()
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for case, *answers in zip(asked, *(way(asked) for way in ways.values()), strict=True):
        first = answers[0]
        if any(said[:3] != first[:3] or None is not said.forced != first.forced for said in answers):
            faults.append(f"{case}: {dict(zip(ways, answers, strict=True))}")
        counts[f"{case.bundle}, {'sampled' if case.temperature else 'greedy'}, {first.stopped}"] += 1
        counts["tokens"] += len(first.ids)
        counts["forced"] += first.forced or 0
        try:
            if first.stopped == "end":
                value = json.loads(first.text)
                jsonschema.validate(value, case.schema, format_checker=checker)
            elif first.stopped not in ("length", "refused"):
                faults.append(f"{case}: {first}")
        except jsonschema.SchemaError:  # an expression that Python's re does not know
            counts["not judged"] += 1
        except (ValueError, jsonschema.ValidationError) as e:
            faults.append(f"{case}: {first.text!r} is called complete: {str(e).splitlines()[0]}")
    return counts, faults


def main() -> None:
    from benchmarks.common import export, parser, report
    from tests.support import cabi, serving, tiny

    from vtx.exporter.bundling.prepare import demo_checkpoint
    from vtx.runtime.api.load import load
    from vtx.tools.data.journal import ResultJournal

    args = parser(__doc__ or "")
    args.add_argument("--count", type=int, default=10_000)
    args.add_argument("--seed", type=int, default=0, help="number of the first schema")
    args.add_argument("--suite", type=Path, metavar="FOLDER", help="of the JSON-Schema-Test-Suite")
    args.add_argument("--clients", type=int, default=4)
    args.add_argument("--work", type=Path, default=Path("build/schemas"), help="bundles, and results [%(default)s]")
    given = args.parse_args()
    random = {"metaspace": tiny.Tiny(context=512, kv_heads=4), "bytes": tiny.Tiny(context=512, tokenizer="bytes")}
    bundles = {name: given.work / name for name in ("demo", *random)}
    for name, folder in bundles.items():
        if not folder.exists():
            checkpoint = given.work / f"{name}-checkpoint"
            made = demo_checkpoint() if name == "demo" else tiny.make(checkpoint, random[name])
            export(made, folder, (3,))
    import llguidance

    os.environ["VTX_LLGUIDANCE"] = str(Path(llguidance.__file__).parent / "_lib.abi3.so")
    files = sorted(given.suite.rglob("*.json")) if given.suite else []
    fixed = [group["schema"] for file in files for group in json.loads(file.read_text(encoding="utf-8"))]
    picture = tiny.random_image(1)
    counts = Counter[str]()
    faults = list[str]()
    about = {"question": QUESTION, "tokens": TOKENS, "model": list(bundles), "llguidance": llguidance.__version__}
    with ExitStack() as stack:
        journal = stack.enter_context(ResultJournal(given.work / "schemas.jsonl", about))
        models = {name: stack.enter_context(load(folder, device="cpu", threads=1)) for name, folder in bundles.items()}
        images = {name: stack.enter_context(model.open(picture)) for name, model in models.items()}
        served = stack.enter_context(serving.serving(bundles))
        message = serving.user(QUESTION, picture)
        libvtx = {name: cabi.Loaded(folder, "cpu").opened(picture) for name, folder in bundles.items()}
        ways = {"python": by_python(images), "server": by_server(served.chat, message, given.clients)}
        ways["libvtx"] = by_libvtx(libvtx)
        chunks = [(f"{first}", first, ()) for first in range(given.seed, given.seed + given.count, CHUNK)]
        chunks += [(f"suite {first}", first, fixed) for first in range(0, len(fixed), CHUNK)]
        for name, first, own in chunks:
            last = len(fixed) if own else given.seed + given.count
            item = f"{name}, {min(CHUNK, last - first)}"
            if item not in journal.results:
                found, wrong = compared(cases(first, min(CHUNK, last - first), list(bundles), own), ways)
                journal.add({item: {"counts": found, "faults": wrong}})
                print(f"{item}: {len(wrong)} faults", *wrong, sep="\n", file=sys.stderr, flush=True)
            counts.update(journal.results[item]["counts"])
            faults += journal.results[item]["faults"]
    table = [["answers", "number"], *([name, f"{count:,}"] for name, count in sorted(counts.items()))]
    report({"counts": counts, "faults": faults, **about}, [*table, ["faults", str(len(faults))]], given.json)
    if faults:
        sys.exit("failed")


if __name__ == "__main__":
    main()
