"""DART: of the image tokens, a few pivots stay, and those that duplicate the pivots least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies.base import Boundary, Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.options import Not, number_to_keep, option, share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens, Mask

Floats = NDArray[np.float32]
TINY = 1e-8  # least product of two lengths, as torch's cosine_similarity has it
FEWEST = 16  # tokens; an image with fewer is left whole by the embedding-level form, as in TensorRT-Edge-LLM


@reduction("dart")
@dataclass(frozen=True, slots=True)
class Dart(Reduction, Entry):
    """After layer `k`, `pivots` image tokens with the largest keys stay, and the image tokens least alike to each of
    these and of `text_pivots` tokens of the question (as the code of DART does it).

    Keys are measured by their L1 norm after rotation, likeness by the cosine of hidden states behind the final norm.
    Each pivot in turn, image pivots first, larger keys first, takes floor(`keep` / all pivots) of what is left, so 128
    of 576 keeps 132 with four and four pivots. order=code, which presets set, takes turns as CPython walks through a
    set of the pivots' positions, as the released code does: `set_order`. k=0 is the form at the level of embeddings,
    before layer 1: everything is measured on input embeddings, text pivots may come from the whole prompt, and exactly
    `keep` of each image stay (TensorRT-Edge-LLM). Either way tokens keep their positions. `keep` is a share up to 1,
    rounded up, or a number.

    Norms and cosines are summed in float64 and rounded to float32, as in libvtx: both runtimes then choose alike, and
    equal tokens are equally large and alike.
    """

    keep: float = share_or_number(0.25)
    k: int = option(2, "give the layer after which tokens leave, or 0 for before layer 1", least=0)
    pivots: int = option(4, "it must be at least 1", least=1)
    text_pivots: int = option(4, "it must be at least 0", least=0)
    order: Literal["size", "code"] = "size"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"keep": 192.0, "order": "code"},
        "128": {"keep": 128.0, "order": "code"},
        "64": {"keep": 64.0, "order": "code"},
    }

    paper_layers: ClassVar[int | None] = 1
    requires: ClassVar[dict[str, Any]] = {"cuts": "k", "final_norm": {"k": Not(0)}}
    conflicts: ClassVar[tuple[tuple[dict[str, Any], str], ...]] = (
        ({"order": "code", "k": 0}, "order=code, which presets set, works only after a layer; with k=0 use order=size"),
    )

    def number_kept(self, count: int, layer: int) -> int:
        """With as many text pivots as the options say: a question of fewer tokens keeps fewer behind layer `k`."""
        keep = min(count, number_to_keep(self.keep, count))
        pivots = self.pivots + self.text_pivots
        if self.k:
            return min(count, self.pivots + keep // pivots * pivots)
        return keep if count >= FEWEST else count

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        if self.number_kept(boundary.count, boundary.layer) == boundary.count:
            return None
        of_pivot = number_to_keep(self.keep, boundary.count) // (self.pivots + self.text_pivots)
        image_keys, text_keys = boundary.keys()
        assert boundary.final_norm is not None
        hidden = boundary.image_hidden() * boundary.final_norm
        text = boundary.question_hidden * boundary.final_norm
        image_pivots = _largest(_size(image_keys), self.pivots)
        text_pivots = _largest(_size(text_keys), self.text_pivots)
        mask = np.zeros(boundary.count, bool)
        mask[image_pivots] = True
        cosines = _cosines(hidden, np.concatenate([hidden[image_pivots], text[text_pivots]]))
        turns = list(range(len(cosines)))  # pivots, the image's first, in the order in which they choose their tokens
        if self.order == "code":
            image, question = boundary.positions()
            positions = [*image[image_pivots].tolist(), *question[text_pivots].tolist()]
            turns = [positions.index(position) for position in set_order(positions)]
        for pivot in turns:
            mask[_lowest(cosines[pivot], ~mask, of_pivot)] = True
        return mask

    @property
    def uses_question(self) -> bool:
        return self.text_pivots > 0

    @property
    def keeps_positions(self) -> bool:
        return True

    def entry(self) -> Entry | None:
        return None if self.k else self

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        rows = image.hidden
        count = self.number_kept(len(image), 1)
        if count == len(rows):
            return None
        image_pivots = _largest(_size(rows), min(self.pivots, count))
        pivots = rows[image_pivots]
        if self.text_pivots:
            assert question is not None
            text_pivots = _largest(_size(question.hidden), self.text_pivots)
            pivots = np.concatenate([pivots, question.hidden[text_pivots]])
        mask = np.zeros(len(rows), bool)
        mask[image_pivots] = True
        for number, cosine in enumerate(_cosines(rows, pivots)):
            share = -(-(count - int(mask.sum())) // (len(pivots) - number))
            mask[_lowest(cosine, ~mask, share)] = True
        return np.flatnonzero(mask)


def set_order(numbers: Sequence[int]) -> list[int]:
    """The order in which CPython iterates over a set of whole numbers from 0 on: the order of its hash table's slots.

    The rule, for this runtime and libvtx, whatever Python does: a table has 8 slots. A number goes into slot
    number mod size; if that is taken, into the first free one of the 9 behind it, if the table has 9 there; else
    these are tried again from slot (5 * slot + 1 + rest) mod size on, where rest is the number divided by 32, then by
    32 again. Once 3 in 5 of the slots but one are taken, the numbers move, in their order, to a table of the first
    power of two above 4 times their count, twice from 50,001 numbers on.
    """
    table: list[int | None] = [None] * 8
    for number in numbers:
        if number in table:
            continue
        _put(table, number)
        entries = [old for old in table if old is not None]
        if len(entries) * 5 >= (len(table) - 1) * 3:
            table = [None] * max(8, 1 << (len(entries) * (4 if len(entries) <= 50_000 else 2)).bit_length())
            for old in entries:
                _put(table, old)
    return [number for number in table if number is not None]


def _put(table: list[int | None], number: int) -> None:
    last = len(table) - 1
    rest = number
    slot = number & last
    while True:
        for at in range(slot, slot + (10 if slot + 9 <= last else 1)):
            if table[at] is None:
                table[at] = number
                return
        rest >>= 5
        slot = (slot * 5 + 1 + rest) & last


def _size(rows: Floats) -> Floats:
    """The L1 norm of each token."""
    size: Floats = np.abs(rows).sum(-1, dtype=np.float64).astype(np.float32)
    return size


def _largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest, the largest first; of equal ones the earlier."""
    return np.argsort(-values, kind="stable")[:count]


def _cosines(rows: Floats, pivots: Floats) -> Floats:
    """The cosine of each pivot with each token, [pivots, tokens]."""
    x = pivots.astype(np.float64)
    y = rows.astype(np.float64)
    lengths = np.linalg.norm(x, axis=-1)[:, None] * np.linalg.norm(y, axis=-1)
    cosines: Floats = (x @ y.T / np.maximum(lengths, TINY)).astype(np.float32)
    return cosines


def _lowest(values: Floats, pool: Mask, count: int) -> Ids:
    """Indices of the `count` lowest values of the pool; of equal ones the earlier."""
    there = np.flatnonzero(pool)
    return there[np.argsort(values[there], kind="stable")[:count]]
