"""A calibration's figures for each item, in memory and as a line of samples.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtx.exporter.reference.attention import AttentionShares
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import Strict, json_value, optional

DAMAGED = "samples.jsonl is damaged, remove it"


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One item. `kl` and `kl_reverse` [K's] are nats of the next token, `top1` [K's] is true if it stays the same.

    `agree` and `right` [1 + K's], no withdrawal first: true if greedy decoding gives the model's own answer and the
    right one; None if there is none. `answer` is the model's own.
    """

    answer: str | None
    kl: tuple[float, ...]
    kl_reverse: tuple[float, ...]
    top1: tuple[bool, ...]
    agree: tuple[bool, ...] | None
    right: tuple[bool, ...] | None
    attention: AttentionShares | None = optional(None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """`results` has an entry for each item; `skipped` a line for each item that could not be asked."""

    ks: tuple[int, ...]
    results: tuple[ItemResult, ...]
    skipped: tuple[str, ...]


def written(result: ItemResult) -> dict[str, Any]:
    """The result as its line holds it."""
    values: dict[str, Any] = json_value(result)
    return values


def read_result(line: dict[str, Any], ks: int) -> ItemResult:
    """The result that a line holds. RequestError if it does not have a figure for each of `ks` K's."""
    result = Strict(RequestError, DAMAGED).read(ItemResult, line, "an item")
    lengths = {"kl": ks, "kl_reverse": ks, "top1": ks, "agree": 1 + ks, "right": 1 + ks}
    for name, length in lengths.items():
        values = getattr(result, name)
        if values is not None and len(values) != length:
            raise RequestError(f"an item has no {name} for every K; {DAMAGED}")
    return result
