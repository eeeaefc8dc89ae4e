"""Requests of every form, the kinds of answer that they ask for, and cards that hold a K and a rest for some kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cards import card_of
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import CHOICE, NUMBER, TEXT, YES_NO, KindDepth, write_card

FORMS: Sequence[tuple[dict[str, Any], set[str]]] = [
    ({}, {TEXT}),
    ({"regex": "[0-9]+"}, {TEXT}),
    ({"grammar": 'start: "a" | "b"'}, {TEXT}),
    ({"choices": ["yes", "no"]}, {YES_NO}),
    ({"choices": ["Yes", "NO"]}, {YES_NO}),
    ({"choices": ["red", "green", "blue"]}, {CHOICE}),
    ({"choices": ["yes", "no", "unsure"]}, {CHOICE}),
    ({"choices": ["1", "2"]}, {CHOICE}),
    ({"schema": {"type": "boolean"}}, {YES_NO}),
    ({"schema": {"type": "integer"}}, {NUMBER}),
    ({"schema": {"type": ["number", "null"]}}, {NUMBER}),
    ({"schema": {"type": "null"}}, {CHOICE}),
    ({"schema": {"const": True}}, {YES_NO}),
    ({"schema": {"const": "a"}}, {CHOICE}),
    ({"schema": {"enum": ["yes", "no"]}}, {YES_NO}),
    ({"schema": {"enum": [1, 2, None]}}, {CHOICE}),
    ({"schema": {"type": "string", "enum": ["a", "b"]}}, {CHOICE}),
    ({"schema": {"type": "string"}}, {TEXT}),
    ({"schema": {"type": "string", "pattern": "[a-z]{3}"}}, {TEXT}),
    ({"schema": {}}, {TEXT}),
    ({"schema": True}, {TEXT}),
    ({"schema": {"type": "object"}}, {TEXT}),
    ({"schema": {"type": "array"}}, {TEXT}),
    ({"schema": {"type": "array", "items": {"type": "integer"}}}, {NUMBER}),
    ({"schema": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["a"]}]}}, {YES_NO, CHOICE}),
    ({"schema": {"anyOf": [{"type": "number"}, {"type": "null"}]}}, {NUMBER}),
    ({"schema": {"oneOf": [{"type": "number"}, {"type": "string"}]}}, {NUMBER, TEXT}),
    ({"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}}, {TEXT}),
    (
        {"schema": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}}},
        {YES_NO, CHOICE},
    ),
    (
        {"schema": {"properties": {"n": {"type": "integer"}, "in": {"properties": {"b": {"type": "boolean"}}}}}},
        {NUMBER, YES_NO},
    ),
    ({"schema": {"type": "object", "properties": {"a": {"type": "boolean"}, "name": {"type": "string"}}}},
     {YES_NO, TEXT}),
    ({"schema": {"type": "object", "additionalProperties": {"type": "number"}}}, {NUMBER}),
]  # fmt: skip


def depth(kind: str, k: int | None, rest: float = 0.0) -> KindDepth:
    return KindDepth(kind, k, rest, 0.99, 0.97, 100)  # type: ignore[arg-type]


def write_kinds(folder: Path, depths: Sequence[KindDepth], k: int | None = 2) -> None:
    """Give a bundle a card whose own choice is `k` without a reduction, with these kinds."""
    write_card(folder, dataclasses.replace(card_of(Bundle.open(folder), k, "none"), kinds=tuple(depths)))
