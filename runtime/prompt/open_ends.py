"""The parts of a form that let an answer go on for as long as the model likes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import Guide

NAMED = 3
# The keys of which one bounds the values of each type.
BOUNDS = {
    "string": ("maxLength", "enum", "const", "format", "pattern"),
    "integer": ("maximum", "exclusiveMaximum", "enum", "const"),
    "number": ("maximum", "exclusiveMaximum", "enum", "const"),
    "array": ("maxItems",),
}


def open_ends(schema: Any) -> list[str]:
    """Each property without a bound, such as "'count' has no maximum", the outermost first."""
    lines = list[str]()
    parts = [("the answer", schema)]
    while parts:
        name, part = parts.pop(0)
        if not isinstance(part, dict):
            continue
        bounds = BOUNDS.get(str(part.get("type")), ())
        if bounds and not part.keys() & set(bounds):
            lines.append(f"{name} has no {bounds[0]}")
        properties = part.get("properties")
        items = part.get("items")
        parts += [(repr(key), value) for key, value in properties.items()] if isinstance(properties, dict) else []
        parts.append((f"an item of {name}", items))
    return lines


def bounds_needed(guide: Guide | None) -> str:
    """The cure of a guided answer that was cut, with what its schema leaves open."""
    lines = open_ends(json.loads(str(guide.schema))) if guide is not None and guide.schema is not None else []
    named = f" ({', '.join(lines[:NAMED])})" if lines else ""
    return f"raise --max-new-tokens, or bound the form's fields{named}"
