"""What a method must say: what it needs of a bundle, and at each of its cuts which image tokens go on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.options import check_limits
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens, Mask, Patches, Scores


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method asks of a bundle.

    `cuts`: layers before which tokens may leave, so a stage begins there. `queries`: layers whose attention it asks
    for. `shrinks`: after the prompt, caches from this layer on keep only what its last cut kept. `merging`,
    `attention`, `last_attention`: the vision graph merges windows, tells what the class token looks at in the tower's
    last block in use, in its very last block. `final_norm`: the weight of the decoder's last norm
    stands in a file of its own. `text_tower`: the bundle holds CLIP's, and the patches in its space.
    """

    cuts: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    shrinks: int | None = None
    merging: bool = False
    attention: bool = False
    last_attention: bool = False
    final_norm: bool = False
    text_tower: bool = False

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
            self.final_norm or other.final_norm,
            self.text_tower or other.text_tower,
        )


def _no_scores(_: bool) -> Scores:
    raise AssertionError("this boundary has no attention to ask for: the policy's needs name no query")


def _no_hidden() -> HiddenStates:
    raise AssertionError("this boundary holds no hidden states of the image tokens")


def _no_positions() -> tuple[Ids, Ids]:
    raise AssertionError("this boundary has no positions to ask for")


def _no_keys() -> tuple[HiddenStates, HiddenStates]:
    raise AssertionError("this boundary has no keys to ask for")


@dataclass(frozen=True, slots=True, eq=False)
class PromptText:
    """The text of a prompt, as known before its images enter the decoder.

    `ids` [n] and their input embeddings `hidden` [n, hidden], in order; `after` [n] says which stand after the last
    image, where the question is. In a chat it is the first turn's, whose choice the later turns keep. `embeddings`
    [segments, width] are CLIP's of the question alone, where a policy needs the text tower.
    """

    ids: Ids
    hidden: HiddenStates
    after: Mask
    embeddings: NDArray[np.float32] | None = None

    @property
    def key(self) -> str:
        """Equal for equal texts."""
        seen = b"" if self.embeddings is None else self.embeddings.tobytes()
        return hashlib.sha256(self.ids.tobytes() + self.after.tobytes() + seen).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """What is known between two stages, for one question.

    `layer` is the first layer to come (1-based, so it is a K). `question_hidden` [n, hidden] are the hidden states of
    the text after the last image. `images` are the image tokens that entered the decoder, `present` [all of them] says
    which are still there. `image_hidden()` gives the hidden states [count, hidden] of these; `keys()` the rotated keys
    of the layer just run, all heads side by side, of these [count, kv_heads * head_dim] and of the question's tokens;
    `final_norm` is the weight [hidden] of the decoder's last norm, where the policy's needs name it; `positions()` are
    those of the image tokens still there and of the question's tokens.
    """

    layer: int
    question_hidden: NDArray[Any]
    images: Sequence[Patches] = ()
    present: Mask = field(default_factory=lambda: np.zeros(0, bool))
    scores: Callable[[bool], Scores] = _no_scores
    image_hidden: Callable[[], HiddenStates] = _no_hidden
    keys: Callable[[], tuple[HiddenStates, HiddenStates]] = _no_keys
    final_norm: NDArray[np.float32] | None = None
    positions: Callable[[], tuple[Ids, Ids]] = _no_positions

    @property
    def count(self) -> int:
        """Image tokens still there."""
        return int(self.present.sum())

    def attention(self, *, last_only: bool = False) -> Scores:
        """What each image token still there gets in the layer just run: (sum, maximum) [count] float32.

        Mean over heads, then over the question's tokens, or `last_only` its last one.

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

    @property
    def uses_question(self) -> bool:
        """Whether `select` looks at the question; an image is then not reused for another question."""
        return False

    @property
    def keeps_positions(self) -> bool:
        """Whether those that enter keep the positions they had among all, gaps between them."""
        return False

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        """Indices of the image tokens that enter the decoder, in their order there; None: all as they are.

        `question` is given where the entry uses it.
        """
        return None


class Reduction:
    """A method that leaves out image tokens. Subclasses are frozen dataclasses of their options (`option`).

    What it is, both runtimes read here: options, `presets`, `requires` and `conflicts` are data, from which libvtx's
    register is made. `requires` gives `needs` by name: cuts, queries and shrinks the option that names the layers after
    which tokens leave (0: none), all others the values of options at which they are needed, `Not(value)` for any
    other value. `conflicts` are values that do not go together, each with the message that refuses them.

    `presets` are sets of options by name; `renumbers`: tokens that go on take new positions without gaps;
    `whole`: at its cuts all image tokens leave, or none; `fixed`: the same tokens leave whatever is asked, so that
    caches serve a prompt that goes on. `thresholds` names options that say how many tokens stay and may be scaled
    together: with all at 0 none leaves, with all at 2 as many as can.
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    requires: ClassVar[dict[str, str | dict[str, Any]]] = {}
    conflicts: ClassVar[tuple[tuple[dict[str, Any], str], ...]] = ()
    whole: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    thresholds: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_limits(self, self.name)
        for values, message in self.conflicts:
            if all(getattr(self, option) == value for option, value in values.items()):
                raise RequestError(f"{self.name}: {message}")

    @property
    def renumbers(self) -> bool:
        return False

    def needs(self) -> Needs:
        needs: dict[str, Any] = {}
        for need, source in self.requires.items():
            if isinstance(source, str):
                value = getattr(self, source)
                layers = value if isinstance(value, tuple) else (value,) if value else ()
                cuts = tuple(layer + 1 for layer in layers)
                needs[need] = min(layers, default=None) if need == "shrinks" else cuts if need == "cuts" else layers
            else:
                needs[need] = all(value == getattr(self, option) for option, value in source.items())
        return Needs(**needs)

    def entry(self) -> Entry | None:
        """What it does to an image before the decoder."""
        return None

    def marks(self, images: Sequence[Patches]) -> Mask | None:
        """Which tokens of the images it never drops, over all of them; None: there are no such tokens."""
        return None

    def number_kept(self, count: int, layer: int) -> int | None:
        """Of `count` image tokens, how many go on at its cut before `layer`, or enter the decoder where that is 1.

        None: that depends on the picture or the question. A plan asks it before there is an answer.
        """
        return None

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        """Which of the image tokens still there go on, [boundary.count]; None: all. Asked at its cuts only."""
        return None
