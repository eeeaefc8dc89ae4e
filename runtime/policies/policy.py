"""The methods of one question, asked in turn at each boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies.base import Boundary, Entry, Needs, Reduction
from vtx.runtime.vision.tokens import Mask


@dataclass(frozen=True, slots=True, eq=False)
class Removal:
    """Image tokens leave at a boundary: `kept` [those that were there] go on, `by` names the methods at work.

    `renumbers`: all tokens that go on, text too, take the positions 0, 1, 2, ...; `shrinks`: earlier caches
    shrink to what it left, unless more leave later.
    """

    kept: Mask
    by: tuple[str, ...]
    renumbers: bool
    shrinks: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """Methods in the order in which they are asked: first the one that removes whole images.

    `final_norm` is the weight [hidden] of the decoder's last norm, if a method needs it.
    """

    parts: tuple[Reduction, ...] = ()
    final_norm: NDArray[np.float32] | None = field(default=None, compare=False)

    def needs(self) -> Needs:
        needs = Needs()
        for part in self.parts:
            needs |= part.needs()
        return needs

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The methods that leave out some tokens, not the whole image."""
        return tuple(part for part in self.parts if not part.whole)

    @property
    def row_cuts(self) -> set[int]:
        """Layers before which some tokens may leave and others stay."""
        return {cut for part in self.reductions for cut in part.needs().cuts}

    @property
    def exit(self) -> int | None:
        """The layer before which the whole image leaves whatever is asked; None if a question decides, or never."""
        cuts = (cut for part in self.parts if part.whole and part.fixed for cut in part.needs().cuts)
        return next(cuts, None)

    @property
    def renumbers(self) -> bool:
        return any(part.renumbers for part in self.parts)

    @property
    def fixed(self) -> bool:
        """True if the same tokens leave whatever is asked."""
        return all(part.fixed for part in self.parts)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The steps before the decoder, in order."""
        return tuple(entry for part in self.parts if (entry := part.entry()) is not None)

    def ask(self, boundary: Boundary) -> Removal | None:
        """The removal of tokens here; None: all go on. Tokens that one part leaves out stay out."""
        kept, dropping = np.ones(boundary.count, bool), list[Reduction]()
        for part in self.parts:
            mask = part.keep_mask(boundary) if kept.any() and boundary.layer in part.needs().cuts else None
            if mask is not None and not mask.all():
                kept = kept & mask
                dropping.append(part)
        if not dropping:
            return None
        shrinks = self.needs().shrinks is not None and not all(part.whole for part in dropping)
        return Removal(kept, tuple(part.name for part in dropping), any(part.renumbers for part in dropping), shrinks)
