"""Choices scored without caches or tries, to which the runtimes' probabilities are held; and hostile forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.support.exported import policy, prompt
from vtx.runtime.api.model import Model
from vtx.runtime.session.session import Session

PATTERNS = [f"a.{{{n}}}b" for n in range(24)]
CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", "pattern": pattern} for n, pattern in enumerate(PATTERNS)}
LONG: dict[str, tuple[dict[str, Any], str]] = {
    "all of": ({"schema": {"allOf": [{"type": "string", "pattern": pattern} for pattern in PATTERNS]}},
               "schema has 24 patterns and formats and combines .*limit is then 8"),
    "references": ({"schema": {"$defs": {**CHAIN, "d24": {"type": "string"}}, "$ref": "#/$defs/d0"}}, "24 patterns"),
    "multiples": ({"schema": {"type": "integer", "multipleOf": 1_000_003}}, "of 1,000,003, the limit is 10,000"),
    "decimals": ({"schema": {"type": "number", "multipleOf": 0.1000003}}, "multiples of 1,000,003,"),
    "many multiples": ({"schema": {"properties": {
        f"p{n}": {"type": "integer", "multipleOf": 9973 - n} for n in range(2)}}}, "multiples of 19,945,"),
    "inside of a text": ({"grammar": 'start: %json {"title": "%json", "type": "integer", "multipleOf": 1000003}'},
                         "grammar asks for multiples"),
    "several multiples": ({"schema": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},
                          "multiples of 99,400,891,"),
    "operators": ({"grammar": "start: A\nA: " + " & ".join(f"/((a|b)*a(a|b){{{n + 60}}}c)*/" for n in range(4))},
                  "grammar has 3 times &, the limit is 1; .*x26"),
    "opposites": ({"grammar": "start: A\nA: ~(" + " | ".join(f"~/((a|b)*a(a|b){{{n}}}c)*/" for n in range(24)) + ")"},
                  "grammar has 25 times ~"),
    "embedded": ({"grammar": 'start: "a" %json {"multipleOf": 1000003, "type": "integer", "title": "}\\\""} "b"'},
                 "grammar asks for multiples"),
}  # fmt: skip
NODE = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "required": ["l", "r"]}
EXPLODING: dict[str, dict[str, Any]] = {
    "nested repeats": {"regex": "((a{100}){100}){100}"},
    "sets of states": {"regex": "(a|b)*a(a|b){300}"},
    "many places": {"regex": "|".join(f"(.*a.{{{n}}}b.*)" for n in range(1, 200))},
    "words": {"regex": "(\\w+\\s?){500}"},
    "a tree without leaves": {"schema": NODE},
    "a list without end": {"schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "a hundred thousand items": {"schema": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}},
    "a million characters": {"schema": {"type": "string", "minLength": 1_000_000}},
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s | "a" | '},
    "combined patterns": {
        "schema": {"allOf": [{"type": "string", "pattern": f"^((a|b)*a(a|b){{{n + 60}}}c)*$"} for n in range(8)]}
    },
}


def plain_scores(model: Model, picture: Image.Image, question: str, choices: Sequence[str]) -> list[float]:
    """The probabilities of choices: each whole conversation as one new prompt, at the default K."""
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    asked, found = prompt(model, [user], [picture]), list[float]()
    for choice in choices:
        own = model.loaded.text.answer_ids(choice)
        session = Session(model.backend, model.manifest)
        rows = [
            session.prefill(asked, policy(model.manifest.default_k)).logits,
            *(session.decode(token) for token in own),
        ]
        known = [row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64)) for row in rows]
        ends = np.logaddexp.reduce(known[-1][list(model.manifest.text.end_ids)])
        found.append(float(sum(row[token] for row, token in zip(known, own, strict=False)) + ends))
    odds = np.exp(np.array(found) - np.logaddexp.reduce(found))
    return [float(value) for value in odds]
