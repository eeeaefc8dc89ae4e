"""The interface of a method: its needs, and the image tokens that go on at its cuts; and policies, made of methods."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import or_
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.options import option_text
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens, Mask, MergedTokens, Patches, Scores


class Needs(NamedTuple):
    """The parts of a bundle that a method requires.

    `cuts`: layers before which tokens may leave, so a stage begins there. `queries`: layers whose attention it reads.
    `shrinks`: after the prompt, caches from this layer on keep only the tokens that its last cut kept. `merging`: the
    vision graph merges windows; `attention`, `last_attention`: it gives the class token's attention in the tower's last
    block in use, in its very last block. `final_norm`: the weight of the decoder's last norm is a file of its own.
    `text_tower`: the bundle holds CLIP's text tower, and the patches in its space. `projector`: the projector is a
    graph of its own, and the vision graph gives the tower's tokens. `tower_layers`: blocks of the tower of which it
    gives the attention that each token gets. `ahead`: layers at a cut that run once over all tokens there, before any
    leaves, for their attention, so each is a stage of its own.
    """

    cuts: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    shrinks: int | None = None
    merging: bool = False
    attention: bool = False
    last_attention: bool = False
    final_norm: bool = False
    text_tower: bool = False
    projector: bool = False
    tower_layers: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Layers at which a stage must begin, in addition to layer 1."""
        return tuple(sorted({*self.cuts, self.shrinks or 1, *(layer + 1 for layer in self.ahead)} - {1}))

    @property
    def scored(self) -> tuple[int, ...]:
        """Layers whose stage gives their queries."""
        return tuple(sorted({*self.queries, *self.ahead}))

    @property
    def of_patches(self) -> bool:
        """True if the vision graph has an input or an output of each patch for it."""
        return self.merging or self.attention or self.last_attention or self.text_tower or bool(self.tower_layers)

    def __or__(self, other: Needs) -> Needs:
        cuts = sorted({*self.cuts, *other.cuts})
        queries = sorted({*self.queries, *other.queries})
        shrinks = min(filter(None, (self.shrinks, other.shrinks)), default=None)
        return Needs(tuple(cuts), tuple(queries), shrinks, *map(or_, self[3:], other[3:]))


def _absent(*_: object) -> Any:
    raise AssertionError("this boundary has no hidden states, keys, positions or attention of the image tokens")


@dataclass(frozen=True, slots=True, eq=False)
class PromptText:
    """The text of a prompt, as known before its images enter the decoder.

    `ids` [n] and their input embeddings `hidden` [n, hidden], in order; `after` [n] marks the text after the last
    image, the question. In a chat it is the text of the first turn, whose selection later turns keep. `embeddings`
    [segments, width] are CLIP's, of the question alone, if a policy needs the text tower.
    """

    ids: Ids
    hidden: HiddenStates
    after: Mask
    embeddings: NDArray[np.float32] | None = None

    @property
    def key(self) -> str:
        """Equal for equal texts."""
        content = b"" if self.embeddings is None else self.embeddings.tobytes()
        return hashlib.sha256(self.ids.tobytes() + self.after.tobytes() + content).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The state between two stages, for one question.

    `layer` is the next layer (1-based, so it is a K). `question` [n, hidden] are the hidden states of the text after
    the last image, where the backend keeps them, and `question_hidden` the same as an array. `images` are the image
    tokens that entered the decoder, `present` [all of them] marks the remaining ones. Of these and of the question's
    tokens, `keys()` gives the keys [tokens, kv_heads * head_dim] of the layer just run, rotated, and `positions()` the
    positions; `image_hidden()` gives the hidden states [count, hidden] of the remaining image tokens. `next_scores`
    runs the next layer, if a method needs it `ahead`. `final_norm` is the weight [hidden] of the decoder's last norm,
    if a method needs it.
    """

    layer: int
    question: HiddenStates
    images: Sequence[Patches] = ()
    present: Mask = field(default_factory=lambda: np.zeros(0, bool))
    scores: Callable[[bool], Scores] = _absent
    image_hidden: Callable[[], HiddenStates] = _absent
    keys: Callable[[], tuple[HiddenStates, HiddenStates]] = _absent
    final_norm: NDArray[np.float32] | None = None
    positions: Callable[[], tuple[Ids, Ids]] = _absent
    next_scores: Callable[[], Scores] = _absent

    @property
    def question_hidden(self) -> NDArray[Any]:
        """The hidden states [n, hidden] of the text after the last image."""
        return np.asarray(self.question)

    @property
    def count(self) -> int:
        """The number of remaining image tokens."""
        return int(self.present.sum())

    def attention(self, *, last_only: bool = False) -> Scores:
        """The attention that each remaining image token gets in the layer just run: (sum, maximum) [count] float32.

        Mean over heads, then over the question's tokens, or `last_only` its last one.

        Raises BundleError: the attention is not a number.
        """
        return self.scores(last_only)

    def next_attention(self) -> NDArray[np.float32]:
        """The attention [count] that the question's last token gives them in the next layer, mean over heads.

        Raises BundleError: the attention is not a number.
        """
        return self.next_scores()[0]


class Entry:
    """The part of a method that works on an image before it enters the decoder. Compared and shown by its options.

    `of_uncut`: it selects from all tokens of whole views, padding included.
    """

    __slots__ = ()
    of_uncut: ClassVar[bool] = False

    def vision_inputs(self) -> Mapping[str, float]:
        """Extra inputs of the vision graph by name, as `tau` from which windows of patches merge; empty: none."""
        return {}

    @property
    def uses_question(self) -> bool:
        """True if `select` reads the question; an image is then not reused for another question."""
        return False

    @property
    def keeps_positions(self) -> bool:
        """True if the tokens that enter keep the positions they had among all, with gaps between them."""
        return False

    def merge(self, image: ImageTokens) -> MergedTokens | None:
        """Sums of the tower's tokens that take the place of the image's tokens; None: it merges none."""
        return None

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        """Indices of the image tokens that enter the decoder, in their order there; None: all as they are.

        `question` is given if the entry uses it.
        """
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of one gate: the probability that the image tokens may leave before layer `k`, and its cost."""

    k: int
    probability: float
    ms: float


class Reduction:
    """A method that leaves out image tokens. Subclasses are frozen dataclasses of their options (`option`).

    What it is, both runtimes read here: options, `presets`, `requires` and `conflicts` are data, from which libvtx's
    register is made. `requires` gives `needs` by name: cuts, queries, ahead and shrinks the option that names the
    layers after which tokens leave (0: none), all others the values of options at which they are needed, `Not(value)`
    for any other value. `conflicts` are values that do not go together, each with the message that refuses them.

    `presets` are sets of options by name; `renumbers`: tokens that go on take new positions without gaps; `per_view`:
    its numbers are those of each view of an image in tiles; `of_videos`: it chooses from whole frames of videos, and
    leaves images whole; `of_entered`: at its cuts they are shares of the tokens that entered the decoder; `whole`: at
    its cuts it withdraws the image, by K and not by a spec: all tokens or none, or with `queries` all but some;
    `last_query`: of the attention it reads only that of the prompt's last token, and none where `number_kept` is all;
    `paper_layers`: its paper's FLOPs count this many full layers fewer than
    run, and two matrices of a feed-forward; `fixed`: the same tokens leave whatever is asked, so that caches serve a
    prompt that goes on. `thresholds` names options that say how many tokens stay and may be scaled together: with all
    at 0 none leaves, with all at 2 as many as can.
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    requires: ClassVar[dict[str, str | dict[str, Any]]] = {}
    conflicts: ClassVar[tuple[tuple[dict[str, Any], str], ...]] = ()
    whole: ClassVar[bool] = False
    per_view: ClassVar[bool] = False
    of_videos: ClassVar[bool] = False
    of_entered: ClassVar[bool] = False
    paper_layers: ClassVar[int | None] = None
    fixed: ClassVar[bool] = False
    last_query: ClassVar[bool] = False
    thresholds: ClassVar[tuple[str, ...]] = ()
    asked: list[Decision] | None = None  # decisions of gates so far

    def __post_init__(self) -> None:
        for option_field in dataclasses.fields(cast(Any, self)):
            limits = option_field.metadata.get("limits")
            value = getattr(self, option_field.name)
            if limits is not None and value is not None and not limits.allow(value):
                raise RequestError(
                    f"{self.name}: {option_field.name} is {option_text(value, exact=True)}; {limits.fix}"
                )
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
                values = {"cuts": cuts, "ahead": frozenset(cuts), "tower_layers": frozenset(layers)}
                needs[need] = min(layers, default=None) if need == "shrinks" else values.get(need, layers)
            else:
                needs[need] = all(value == getattr(self, option) for option, value in source.items())
        return Needs(**needs)

    def entry(self) -> Entry | None:
        """The step before the decoder, if there is one."""
        return None

    def marks(self, images: Sequence[Patches]) -> Mask | None:
        """A mask over the tokens of all images: the tokens it never drops; None if there are none."""
        return None

    def number_kept(self, count: int, layer: int) -> int | None:
        """The number of `count` image tokens that go on at its cut before `layer`, or enter the decoder if that is 1.

        `count` are those there, with `of_entered` those that entered. None: that depends on the picture or the
        question. A plan asks it before there is an answer.
        """
        return None

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        """A mask [boundary.count] of the remaining image tokens that go on; None: all. Called at its cuts only."""
        return None


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
    """The methods of one question, in the order in which they are asked: first the one that removes whole images.

    `final_norm` is the weight [hidden] of the decoder's last norm, if a method needs it. The rest follows from `parts`:
    their `needs`; the `reductions`, which leave out some tokens and are no part of K; the layers `partial_cuts`
    before which they may do so; the layer `exit` before which the whole image leaves whatever is asked, None if a
    question decides, or never; the layer `rest_cut` from which only a rest of them goes on, None without a rest, which
    every prompt chooses anew, also a later turn of a chat; `fixed`: the same tokens leave whatever is asked;
    `renumbers`: a part does; the `entries` before the decoder, in order; `uses_question`: one of these does; the
    `decisions` of gates so far, None without gates.
    """

    parts: tuple[Reduction, ...] = ()
    final_norm: NDArray[np.float32] | None = field(default=None, compare=False)
    needs: Needs = field(init=False, repr=False, compare=False)
    reductions: tuple[Reduction, ...] = field(init=False, repr=False, compare=False)
    partial_cuts: frozenset[int] = field(init=False, repr=False, compare=False)
    exit: int | None = field(init=False, repr=False, compare=False)
    rest_cut: int | None = field(init=False, repr=False, compare=False)
    fixed: bool = field(init=False, repr=False, compare=False)
    renumbers: bool = field(init=False, repr=False, compare=False)
    entries: tuple[Entry, ...] = field(init=False, repr=False, compare=False)
    uses_question: bool = field(init=False, repr=False, compare=False)
    decisions: list[Decision] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        needs = Needs()
        reductions = list[Reduction]()
        partial_cuts = set[int]()
        entries = list[Entry]()
        exit = rest_cut = decisions = None
        renumbers = uses_question = False
        fixed = True
        for part in self.parts:
            part_needs = part.needs()
            needs |= part_needs
            if not part.whole:
                reductions.append(part)
                partial_cuts.update(part_needs.cuts)
            elif part_needs.queries:
                rest_cut = part_needs.cuts[0]
                partial_cuts.add(rest_cut)
            elif part.fixed and part_needs.cuts:
                exit = part_needs.cuts[0]
            fixed = fixed and part.fixed
            renumbers = renumbers or part.renumbers
            if (entry := part.entry()) is not None:
                entries.append(entry)
                uses_question = uses_question or entry.uses_question
            decisions = decisions if part.asked is None else part.asked
        derived = needs, tuple(reductions), frozenset(partial_cuts), exit, rest_cut, fixed, renumbers
        for derived_field, value in zip(
            fields(self)[2:], (*derived, tuple(entries), uses_question, decisions), strict=True
        ):
            object.__setattr__(self, derived_field.name, value)

    def readers(self, layer: int, count: int) -> list[Reduction]:
        """The methods that read the attention of `layer` where `count` image tokens are left."""
        readers = [part for part in self.parts if layer in part.needs().queries]
        return [part for part in readers if not part.last_query or part.number_kept(count, layer + 1) != count]

    def ask(self, boundary: Boundary) -> Removal | None:
        """The removal of tokens here; None: all go on. Tokens that one part leaves out stay out."""
        stays = np.ones(boundary.count, bool)
        by = list[str]()
        shrinks = renumbers = False
        for part in self.parts:
            mask = part.keep_mask(boundary) if stays.any() and boundary.layer in part.needs().cuts else None
            if mask is not None and not mask.all():
                stays = stays & mask
                by.append(part.name)
                shrinks = shrinks or not part.whole
                renumbers = renumbers or part.renumbers
        return Removal(stays, tuple(by), renumbers, shrinks and self.needs.shrinks is not None) if by else None


R = TypeVar("R", bound=Reduction)
registered: dict[str, type[Reduction]] = {}


def reduction(name: str) -> Callable[[type[R]], type[R]]:
    """Register a method, a frozen dataclass, under its name; its fields are the options of its spec.

    A field is an int, a float, a float or None ("off"), a tuple of ints ("3/7/11") or a Literal of strings, and has
    a default. `option` says which values it may have.
    """

    def register(kind: type[R]) -> type[R]:
        assert dataclasses.is_dataclass(kind), f"{kind.__name__} is not a dataclass; put @dataclass below @reduction"
        if name in registered:
            raise RequestError(f"two reductions are called {name}; rename one in its @reduction(...)")
        kind.name = name
        registered[name] = kind
        return kind

    return register
