"""Random JSON schemas of the subset that guided decoding supports, from any source of random numbers."""

from __future__ import annotations

from random import Random
from typing import Any

KEYS = ("a", "shape", "count", "is_red", "Größe", 'quo"te', "k")
WORDS = ("red", "circle", "", "é", "a b", "\n", 'x"y', "\\", "日本")


def random_schema(rng: Random, depth: int = 3) -> dict[str, Any]:
    """A schema nested at most `depth` deep; most of its answers are short."""
    simple = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern")
    kind = rng.choice(simple if depth == 0 else (*simple, "array", "tuple", "object", "object", "anyOf", "ref"))
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
    if kind == "integer":
        low = rng.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "number":
        return {"type": "number", "minimum": rng.randint(-5, 0), "maximum": rng.randint(1, 5)}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, "a"], {"a": 1}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 0, False, {"k": [None]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{4}-[0-9]{2}$"])}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "tuple":
        parts = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "object":
        names = rng.sample(KEYS, rng.randint(0, 4))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: random_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "ref":
        tree = {
            "type": "object", "properties": {"v": random_schema(rng, 0), "next": {"$ref": "#/$defs/tree"}},
            "required": ["v"], "additionalProperties": False,
        }  # fmt: skip
        # A reference from the root only: nested schemas of this generator have no root of their own.
        return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}} if depth == 3 else {"type": "null"}
    return {"type": kind}
