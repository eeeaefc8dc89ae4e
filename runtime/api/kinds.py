"""K by the kind of answer: what the form of a request says its answer will be, and the card's K and rest for that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtx.runtime.bundle.card import CHOICE, NUMBER, TEXT, YES_NO, Kind, KindDepth
from vtx.runtime.bundle.spec.model_spec import ModelSpec, unscored

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import Guide

_OF_TYPES: dict[str, Kind] = {"boolean": YES_NO, "integer": NUMBER, "number": NUMBER}
_COMBINED = ("prefixItems", "anyOf", "oneOf", "allOf")  # lists of schemas


def kinds_of(guide: Guide | None) -> frozenset[Kind]:
    """The kinds of answer that a request's form asks for; whatever is not closed is quoted text."""
    if guide is not None and guide.choices is not None:
        return frozenset([_kind_of_values(guide.choices)])
    if guide is not None and guide.schema is not None:
        return _kinds_of_schema(json.loads(str(guide.schema)))
    return frozenset([TEXT])


def card_depth(depths: Sequence[KindDepth], guide: Guide | None, model: ModelSpec) -> tuple[int | None, float | None]:
    """The largest K and rest of the kinds that a request's form asks for; of all kinds if it may be quoted text.

    (None, None), so in full, if one was not measured or needs it, or if no rest can be chosen at that K.
    """
    by_kind = {depth.kind: depth for depth in depths}
    kinds = kinds_of(guide)
    if not kinds <= by_kind.keys():
        return None, None
    choice = depths if TEXT in kinds else [by_kind[kind] for kind in kinds]
    ks = [depth.k for depth in choice if depth.k is not None]
    rest = max(depth.rest for depth in choice)
    if len(ks) < len(choice) or (rest and unscored(model, max(ks) - 1)):
        return None, None
    return max(ks), rest or None


def _kind_of_values(values: Sequence[Any]) -> Kind:
    """The kind of an answer that is one of these values."""
    closed = [isinstance(value, bool) or str(value).lower() in ("yes", "no") for value in values]
    return YES_NO if all(closed) else CHOICE


def _kinds_of_schema(schema: Any) -> frozenset[Kind]:
    """The kinds of the values that a JSON schema leaves open; a text without a list of its values is quoted text."""
    kinds = set[Kind]()
    parts = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            kinds.add(TEXT)
        elif "const" in part:
            kinds.add(_kind_of_values([part["const"]]))
        elif isinstance(part.get("enum"), list):
            kinds.add(_kind_of_values(part["enum"]))
        else:
            inner = _inner(part)
            types = part.get("type")
            names = types if isinstance(types, list) else [types]
            nested = ("null", "object", "array", None) if inner and "$ref" not in part else ("null",)
            kinds.update(_OF_TYPES.get(str(name), TEXT) for name in names if name not in nested)
            parts += inner
    return frozenset(kinds or [CHOICE])


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the values inside a value of this schema."""
    properties = schema.get("properties")
    inner = list(properties.values()) if isinstance(properties, dict) else []
    inner += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for name in _COMBINED:
        listed = schema.get(name)
        inner += listed if isinstance(listed, list) else []
    return inner
