"""What a method must say: what it needs of a bundle, and at each of its cuts which vision rows go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.vision.tokens import Ids, ImageTokens, Mask, Patches, Scores


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method asks of a bundle.

    `cuts`: layers before which rows may leave, so a stage begins there. `queries`: layers whose attention it asks
    for. `shrinks`: after the prompt, caches from this layer on keep only what its last cut kept. `merging`,
    `attention`, `last_attention`: the vision graph merges windows, tells what the class token looks at in the tower's
    last block in use, in its very last block.
    """

    cuts: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    shrinks: int | None = None
    merging: bool = False
    attention: bool = False
    last_attention: bool = False

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Layers at which a stage must begin, beside layer 1."""
        return tuple(sorted({*self.cuts, self.shrinks or 1} - {1}))

    def __or__(self, other: Needs) -> Needs:
        shrinks = [n for n in (self.shrinks, other.shrinks) if n is not None]
        return Needs(
            tuple(sorted({*self.cuts, *other.cuts})),
            tuple(sorted({*self.queries, *other.queries})),
            min(shrinks, default=None),
            self.merging or other.merging,
            self.attention or other.attention,
            self.last_attention or other.last_attention,
        )


def _no_scores(_: bool) -> Scores:
    raise AssertionError("this boundary has no attention to ask for: the policy's needs name no query")


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The place between two stages, for one question.

    `layer` is the first layer to come (1-based, so it is a K). `rows` [n, hidden] are the question's hidden states
    there. `images` are the vision rows that entered the decoder, `present` [all of them] says which are still there.
    """

    layer: int
    rows: NDArray[Any]
    images: Sequence[Patches] = ()
    present: Mask = field(default_factory=lambda: np.zeros(0, bool))
    scores: Callable[[bool], Scores] = _no_scores

    @property
    def count(self) -> int:
        """Vision rows still there."""
        return int(self.present.sum())

    def attention(self, *, last_only: bool = False) -> Scores:
        """What each vision row still there gets in the layer just run: (sum, maximum) [count] float32.

        Mean over heads, then over the question's rows, or `last_only` its last one.

        Raises:
            BundleError: the attention is not a number.

        """
        return self.scores(last_only)


class Entry:
    """The part of a method that works on an image before it enters the decoder. Compared and shown by its options."""

    __slots__ = ()

    def vision_inputs(self) -> Mapping[str, float]:
        """Extra inputs of the vision graph by name, as `tau` from which windows of patches merge; empty: none."""
        return {}

    def select(self, image: ImageTokens) -> Ids | None:
        """Indices of the image tokens that enter the decoder, in their order there; None: all as they are."""
        return None


class Reduction:
    """A method that leaves out vision rows. Subclasses are frozen dataclasses of their options.

    `presets` are sets of options by name; `renumbers`: rows that go on take new positions without gaps;
    `whole`: at its cuts all vision rows leave, or none. `thresholds` names options that say how many rows stay and may
    be scaled together: with all at 0 none leaves, with all at 2 as many as can.
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    whole: ClassVar[bool] = False
    thresholds: ClassVar[tuple[str, ...]] = ()

    @property
    def renumbers(self) -> bool:
        return False

    def needs(self) -> Needs:
        return Needs()

    def entry(self) -> Entry | None:
        """What it does to an image before the decoder."""
        return None

    def marks(self, images: Sequence[Patches]) -> Mask | None:
        """Which rows of the images it never drops, over all of them; None: there are no such rows."""
        return None

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        """Which of the vision rows still there go on, [boundary.count]; None: all. Asked at its cuts only."""
        return None
