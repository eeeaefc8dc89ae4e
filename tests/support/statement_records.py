"""Records of the plain statement of methods: what a method leaves out, rows and caches on their way, an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Method:
    """What is to be left out, as the words of the command line say it.

    `tau`: windows merge from this mean cosine on. `cls_keep`: the share of an image's rows that enters the decoder.
    `key`: the share that no prune may drop, by the class token's attention in the last block in use or, with
    keys=last-block, in the tower's very last one. `layers` with `gamma` and `alpha`: dual attention after these layers.
    `fastv`: (after this layer, share to drop). `cdpruner`: (number to keep, text), `dart`: (number to keep, k, image
    pivots, text pivots), `divprune`: the number to keep, `visionzip`: (dominant tokens, contextual ones),
    `hiprune`: (number to keep, alpha, block of the tower), `pyramiddrop`: (share that goes on at each cut, layers after
    which), which renumbers with positions=renumber. `k`: withdrawal before this layer, of whatever is left.
    """

    tau: float | None = None
    order: Literal["raster", "merged-first"] = "raster"
    cls_keep: float | None = None
    key: float = 0.0
    layers: tuple[int, ...] = ()
    gamma: float = 0.0
    alpha: float = 0.0
    positions: Literal["keep", "renumber"] = "keep"
    fastv: tuple[int, float] | None = None
    keys: Literal["used-block", "last-block"] = "used-block"
    cdpruner: tuple[int, Literal["embedding", "none", "tower"]] | None = None
    divprune: int | None = None
    visionzip: tuple[int, int] | None = None
    hiprune: tuple[int, float, int] | None = None
    dart: tuple[int, int, int, int] | None = None
    dart_order: Literal["size", "code"] = "size"
    pyramiddrop: tuple[float, tuple[int, ...]] | None = None
    k: int | None = None


@dataclass
class Image:
    """One image's rows as they enter the decoder, [n, hidden], and of each its first patch in raster order.

    The class token, where it is a row, has place -1. `attention` is what the class token gives to each row,
    `similarity` the mean cosine of a merged window, None of other rows. `offsets` are positions behind the image's
    first one, of which it takes `span`; empty where they have no gaps; arrays of three parts at native resolution.
    `maps`, alike, are added to the rows after a layer each, from the first on.
    `of_tile`: the tile of each row, -1 a newline's;
    empty for an image in one piece, whose `placeholders` in the prompt the configuration says.
    """

    rows: Tensor
    places: list[int]
    merged: list[bool]
    attention: list[float] | None
    similarity: list[float | None]
    hidden: Tensor  # the tower's hidden states that CDPruner projects into CLIP's space
    offsets: list[Any] = field(default_factory=list)
    span: int = 0
    of_tile: list[int] = field(default_factory=list)
    placeholders: int = 0
    received: Tensor | None = None  # HiPrune's two scores of each row
    maps: list[Tensor] = field(default_factory=list)
    tower: tuple[Tensor, Tensor, Tensor] | None = None  # all its tokens: what is projected, mean keys, class attention

    def take(self, which: list[int]) -> Image:
        def of(values: list[Any]) -> list[Any]:
            return [values[i] for i in which]

        attention = None if self.attention is None else of(self.attention)
        return Image(
            self.rows[which], of(self.places), of(self.merged), attention, of(self.similarity), self.hidden[which],
            of_tile=of(self.of_tile) if self.of_tile else [], placeholders=self.placeholders,
            offsets=of(self.offsets) if self.offsets else [], span=self.span, maps=[each[which] for each in self.maps],
        )  # fmt: skip


@dataclass
class Row:
    """One row on its way through the decoder; `image` is its number among the image rows, None for text.

    `asks`: it stands after the last image, so its attention counts.
    """

    position: Any  # a number, or an array of three
    image: int | None
    asks: bool = False


@dataclass
class Cache:
    """One layer's keys and values [kv_heads, n, head_dim] and the rows they came from."""

    key: Tensor
    value: Tensor
    rows: list[Row]

    def keep(self, which: list[int]) -> None:
        self.key, self.value = self.key[:, which], self.value[:, which]
        self.rows = [self.rows[i] for i in which]


@dataclass
class Outcome:
    """An answer: `logits` [n, vocab], row t chose ids[t]; per layer the slots and image rows after the prompt.

    `kept[l]` are the image rows that go on after layer l, numbered as they entered the decoder; `received[l]` what
    each row before the prune at l got: (sum over the question's rows, maximum over them).
    """

    ids: list[int] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))
    images: list[Image] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    vision: list[int] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)
    received: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        """The smallest lead of a chosen logit over the next; below the tolerance on logits, ids prove nothing."""
        first, second = self.logits.topk(2).values.T
        return float((first - second).min())
