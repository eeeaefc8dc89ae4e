"""Right answers by the form that they are asked in: free, choices, schema, schema in the prompt, answer then fill in.

    python -m benchmarks.forms build/demo build/other --scenes 300 --json forms.json

Each drawn scene is asked greedily for the number of its shapes (an integer from 0 to 9), the colour of a shape that it
has once (one of six) and whether it has a coloured shape (yes or no). The demo and bundles of other models trained on
these scenes know such questions; any other model can be asked, too. A free answer is right if it is the right one to
the letter. A run adds its scenes to those in --work. Intervals are Wilson's over scenes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.tools.data.scenes import COLORS, SHAPES, Scene, photograph, random_scene

SEED = 8_000_000_000
FORMS = ("free", "choices", "schema", "schema in the prompt", "answer, then fill in")


class Item(NamedTuple):
    """A question, the name and schema of its field, the texts of the field's values, and the right one of them."""

    kind: str
    question: str
    schema: Mapping[str, Any]
    values: Mapping[str, Any]
    answer: str


def items_of(scene: Scene, rng: random.Random) -> Iterator[Item]:
    numbers = {str(number): number for number in range(10)}
    bounded = {"type": "integer", "minimum": 0, "maximum": 9}
    yield Item("number", "How many shapes are there?", bounded, numbers, str(len(scene.things)))
    single = [thing for thing in scene.things if sum(other.shape == thing.shape for other in scene.things) == 1]
    colors = {color: color for color in COLORS}
    if single:
        thing = rng.choice(single)
        yield Item("choice", f"What color is the {thing.shape}?", {"enum": list(colors)}, colors, thing.color)
    color = rng.choice(list(COLORS))
    shape = rng.choice(list(SHAPES))
    if rng.random() < 0.5:
        chosen = rng.choice(scene.things)
        color = chosen.color
        shape = chosen.shape
    there = any(thing.color == color and thing.shape == shape for thing in scene.things)
    answer = "yes" if there else "no"
    yield Item("yes or no", f"Is there a {color} {shape}?", {"type": "boolean"}, {"yes": True, "no": False}, answer)


def asked(image: Conversation, item: Item, form: str) -> tuple[bool, Answer]:
    """Whether the answer is right, and the answer."""
    if form == "free":
        answer = image.ask(item.question, max_new_tokens=16)
        return answer.text.strip().lower() == item.answer, answer
    if form == "choices":
        answer = image.ask(item.question, choices=list(item.values))
        return answer.text == item.answer, answer
    schema = {
        "type": "object",
        "properties": {"answer": item.schema},
        "required": ["answer"],
        "additionalProperties": False,
    }
    settings: dict[str, Any] = {"schema": schema, "max_new_tokens": 32}
    settings |= {"schema in the prompt": {"schema_in_prompt": True}, "answer, then fill in": {"fill": True}}.get(
        form, {}
    )
    answer = image.ask(item.question, **settings)
    right = answer.stopped == "end" and json.loads(answer.text).get("answer") == item.values[item.answer]
    return right, answer


def measured(
    image_of: Callable[[Any], Conversation], scenes: Iterable[int], write: Callable[[dict[str, Any]], object]
) -> None:
    """Write a record of every answer about these scenes."""
    for number in scenes:
        rng = random.Random(SEED + number)
        scene = random_scene(rng)
        with image_of(photograph(scene, rng)) as image:
            for item in items_of(scene, rng):
                for form in FORMS:
                    right, answer = asked(image, item, form)
                    imposed = answer.stats.imposed
                    write(
                        {
                            "scene": number,
                            "kind": item.kind,
                            "form": form,
                            "right": right,
                            "imposed": None if imposed is None else imposed.mean_logprob,
                        }
                    )


def row(records: list[dict[str, Any]], model: str, form: str) -> dict[str, Any]:
    """The shares of right answers of a form in percent, and the log probabilities of what it imposed."""
    from vtx.tools.data.intervals import grouped_share

    of_form = [record for record in records if record["form"] == form]
    out: dict[str, Any] = {"model": model, "form": form}
    for kind in ("number", "choice", "yes or no", "all"):
        own = [record for record in of_form if kind in (record["kind"], "all")]
        share = grouped_share([record["right"] for record in own], [record["scene"] for record in own])
        out[kind] = f"{100 * share.share:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"
    logprobs = [record["imposed"] for record in of_form if record["imposed"] is not None]
    out["imposed"] = "-"
    if len(logprobs) > 1:
        fives = quantiles(logprobs, n=20)
        out["imposed"] = f"{fives[0]:.1f} to {fives[-1]:.1f}"
    return out


def main() -> None:
    from benchmarks.common import parser, report

    from vtx.runtime.api.load import load

    args = parser(__doc__ or "")
    args.add_argument("bundles", nargs="+", type=Path)
    args.add_argument("--scenes", type=int, default=300)
    args.add_argument("--first", type=int, default=0, help="number of the first scene [%(default)s]")
    args.add_argument("--work", type=Path, default=Path("build/forms"), help="answers, to which a run adds its scenes")
    args.add_argument("--threads", type=int, default=1)
    given = args.parse_args()
    rows = list[dict[str, Any]]()
    given.work.mkdir(parents=True, exist_ok=True)
    for folder in given.bundles:
        answers = given.work / f"{folder.name}.jsonl"
        known = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
        left = {*range(given.first, given.first + given.scenes)} - {record["scene"] for record in known}
        with load(folder, device="cpu", threads=given.threads) as model, answers.open("a", encoding="utf-8") as file:
            measured(model.open, sorted(left), lambda record: file.write(json.dumps(record) + "\n"))
            name = f"{folder.name} ({model.manifest.precision}, K = {model.manifest.default_k or 'none'})"
        records = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        rows += [row(records, name, form) for form in FORMS]
    table = [list(rows[0]), *([str(value) for value in one.values()] for one in rows)]
    report({"rows": rows}, table, given.json)


if __name__ == "__main__":
    main()
