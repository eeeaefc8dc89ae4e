"""The parts of a form without an end are named with the key that bounds them."""

from __future__ import annotations

from typing import Any

import pytest

from vtx.runtime.prompt.guiding import Guide
from vtx.runtime.prompt.open_ends import bounds_needed, open_ends

COUNT = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "lines"),
    [
        ({"properties": {"count": COUNT}}, ["'count' has no maximum"]),
        ({"properties": {"count": {**COUNT, "maximum": 9}, "size": {"type": "number", "exclusiveMaximum": 1}}}, []),
        ({"properties": {"name": {"type": "string"}, "code": {"type": "string", "pattern": "a"}}},
         ["'name' has no maxLength"]),
        ({"type": "array", "items": {"type": "string", "enum": ["a"]}}, ["the answer has no maxItems"]),
        ({"type": "array", "maxItems": 2, "items": COUNT}, ["an item of the answer has no maximum"]),
        ({"properties": {"outer": {"properties": {"inner": {"type": "string"}}}}}, ["'inner' has no maxLength"]),
        (True, []),
        ({"properties": {"a": True, "b": {"const": 1}, "c": {"type": ["string", "null"]}}}, []),
    ],
)  # fmt: skip
def test_every_value_without_a_bound_is_named(schema: Any, lines: list[str]) -> None:
    assert open_ends(schema) == lines


def test_the_cure_names_three_of_them_at_most() -> None:
    many = Guide(schema={"properties": {name: COUNT for name in "abcde"}})
    cure = bounds_needed(many)
    assert cure.endswith("('a' has no maximum, 'b' has no maximum, 'c' has no maximum)")
    assert bounds_needed(Guide(regex="a*")) == "raise --max-new-tokens, or bound the form's fields"
