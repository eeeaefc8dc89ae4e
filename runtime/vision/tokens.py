"""The tokens of an image: their hidden states, and the patches that they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.model_spec import TowerSpec

HiddenStates = NDArray[np.float32]  # [tokens, hidden]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Scores = tuple[NDArray[np.float32], NDArray[np.float32]]
Extras = Mapping[str, NDArray[np.float32]]  # extra inputs of a vision graph, by name
NO_EXTRAS: Extras = MappingProxyType({})
NEWLINE = -2  # the patch index of a learned newline


@dataclass(frozen=True, slots=True, eq=False)
class TokenStates:
    """Inputs of a stage: the hidden states [n, hidden] of tokens, and further inputs of each token.

    `inputs`: [n, width] float32, by the names that the manifest declares under `token_inputs`.
    """

    hidden: HiddenStates
    inputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.hidden)

    def part(self, start: int, end: int) -> TokenStates:
        """The tokens from number `start` to before number `end`."""
        return TokenStates(self.hidden[start:end], {name: x[start:end] for name, x in self.inputs.items()})

    def take(self, which: Ids) -> TokenStates:
        """The tokens of these numbers, in that order."""
        return TokenStates(self.hidden[which], {name: x[which] for name, x in self.inputs.items()})

    def then(self, others: TokenStates) -> TokenStates:
        """These tokens, then `others`."""
        inputs = {name: np.concatenate([x, others.inputs[name]]) for name, x in self.inputs.items()}
        return TokenStates(np.concatenate([self.hidden, others.hidden]), inputs)

    def after(self, hidden: HiddenStates) -> TokenStates:
        """The same tokens with the `hidden` states after a stage."""
        return TokenStates(hidden, self.inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """The patches of one image's tokens; arrays [tokens], in the order of the tokens.

    `indices`: the patch in raster order, view by view (of a merged window its first one; -1 the tower's class token, -2
    a newline between rows of tiles). `merged`: the token is a merged window. `signals`: further outputs of the vision
    graph, [tokens] by name, if the bundle was exported for them. `views`: of an image in tiles, the one that each token
    comes from, -1 none; None: there is one view. `frames`: of a video, the frame that each token comes from, -1 none.
    """

    indices: Ids
    merged: Mask
    signals: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    views: Ids | None = None
    frames: Ids | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, which: Ids) -> Patches:
        signals = {name: signal[which] for name, signal in self.signals.items()}
        views, frames = (None if of is None else of[which] for of in (self.views, self.frames))
        return Patches(self.indices[which], self.merged[which], signals, views, frames)

    def highest_of_each_view(self, signal: str, part: float) -> Mask:
        """Of each view the `part` of its tokens, rounded up, with the highest `signal`; never a newline."""
        values = self.signals[signal]
        mask = np.zeros(len(self), bool)
        for view in self.of_views():
            mask[view] = highest(values[view], share(part, len(view)))
        return mask

    def of_views(self) -> list[Ids]:
        """The indices of each view's tokens, without newlines."""
        if self.views is None:
            return [np.arange(len(self))]
        return [np.flatnonzero(self.views == view) for view in np.unique(self.views[self.views >= 0])]

    def of_frames(self) -> Ids | None:
        """The indices [frames, tokens] of each frame's tokens, of a whole video; None: this is an image."""
        if self.frames is None:
            return None
        indices = np.flatnonzero(self.frames >= 0)
        return indices.reshape(int(self.frames.max()) + 1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class TowerTokens:
    """The tower's own tokens of each view of an image, the class token first, as the last block in use leaves them.

    `states` [views, n, width] go into the projector, `keys` [views, n, size] are the means over heads of its keys and
    `attention` [views, n] what its class token gives to each, mean over heads. `columns`: the tiles of a row.
    """

    states: HiddenStates
    keys: NDArray[np.float32]
    attention: NDArray[np.float32]
    columns: int = 1

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.keys.nbytes + self.attention.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class MergedTokens:
    """New tokens [n] of an image, each a weighted sum of the tower's before the projector, and their patches.

    `sources` [m] are numbers of the tower's tokens, view after view, and `weights` [m] theirs; those of token i begin
    at `starts[i]`, [n]. A sum of several has the patch index of its target, the first of them.
    """

    patches: Patches
    starts: Ids
    sources: Ids
    weights: NDArray[np.float32]

    def states(self, tower: TowerTokens) -> HiddenStates:
        """The sums [n, width]."""
        states = tower.states.reshape(-1, tower.states.shape[-1])[self.sources]
        sums: HiddenStates = np.add.reduceat(states * self.weights[:, None], self.starts)
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """The tokens of one image: their `hidden` states [tokens, hidden] from the tower and projector, and their patches.

    `idle` counts further tokens that the vision graph computed: of merged windows, if its sizes are fixed.
    `offsets` [tokens] are their positions after the image's first one and `span` the positions that the image takes;
    None: they follow each other without gaps. Offsets of three parts, time, row and column, are [tokens, 3]. `runs`:
    the numbers of tokens between texts of the prompt, if each of them takes `span` positions anew, and one without
    tokens takes none. `derived` is a cache of what policies compute from these tokens. `key` is the hash of the image's
    pixels. `tower` are the tower's tokens that they were made of, if the bundle was exported for that. `uncut` are the
    tokens of all whole views, of which the layout left out padding, where a method that wants them was exported.
    """

    hidden: HiddenStates
    patches: Patches
    idle: int = 0
    offsets: Ids | None = None
    span: int | None = None
    derived: dict[str, NDArray[Any]] = field(default_factory=dict)
    key: str = ""
    tower: TowerTokens | None = None
    runs: tuple[int, ...] = ()
    uncut: ImageTokens | None = None

    def __len__(self) -> int:
        return len(self.hidden)

    @classmethod
    def of(cls, outputs: Mapping[str, NDArray[Any]], tower: TowerSpec) -> ImageTokens:
        """The outputs of the tower's graph for one image, by name, without tokens marked as gone."""
        features = outputs[names.FEATURES]
        hidden: HiddenStates = features.reshape(-1, features.shape[-1])
        patches = cls.one_per_patch(hidden, class_first=tower.class_first(len(hidden))).patches
        indices = outputs.get(names.PATCH_INDEX, patches.indices)
        merged = outputs.get(names.MERGED, patches.merged)
        present = np.flatnonzero(merged != names.GONE)
        signal_names = names.VISION_SIGNALS
        signals = {name: x for name, x in outputs.items() if name in signal_names or name.startswith(names.TOKEN_INPUT)}
        patches = Patches(indices, merged == names.WINDOW, signals)
        before = None
        if (tower_tokens := outputs.get(names.TOWER_TOKENS)) is not None:
            width = tower.state_width
            before = TowerTokens(tower_tokens[..., :width], tower_tokens[..., width:-1], tower_tokens[..., -1])
        if len(present) == len(hidden):
            return cls(hidden, patches, tower=before)
        return cls(hidden[present], patches.take(present), len(hidden) - len(present), tower=before)

    @classmethod
    def one_per_patch(cls, hidden: HiddenStates, *, class_first: bool = False) -> ImageTokens:
        """Tokens of a vision graph that does not merge: one a patch in raster order, before them the class token."""
        count = len(hidden)
        return cls(hidden, Patches(np.arange(count, dtype=np.int64) - class_first, np.zeros(count, bool)))

    @classmethod
    def newlines(cls, hidden: HiddenStates) -> ImageTokens:
        """Tokens that come from no patch: learned newlines."""
        return cls(hidden, Patches(np.full(len(hidden), NEWLINE), np.zeros(len(hidden), bool)))

    @property
    def positions(self) -> int:
        """The number of positions that the image takes."""
        return len(self) if self.span is None else self.span * (sum(map(bool, self.runs)) if self.runs else 1)

    def take(self, which: Ids, *, keep_positions: bool = False) -> ImageTokens:
        """Some of the tokens; once positions have been kept, they are."""
        hidden = self.hidden[which]
        patches = self.patches.take(which)
        if not keep_positions and self.offsets is None:
            return ImageTokens(hidden, patches, key=self.key, tower=self.tower)
        offsets = np.arange(len(self), dtype=np.int64) if self.offsets is None else self.offsets
        span = len(self) if self.span is None else self.span
        view_numbers = np.repeat(np.arange(len(self.runs)), self.runs)[which] if self.runs else None
        runs = () if view_numbers is None else tuple(np.bincount(view_numbers, minlength=len(self.runs)).tolist())
        return ImageTokens(hidden, patches, 0, offsets[which], span, key=self.key, tower=self.tower, runs=runs)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: the number of image tokens in each of its `spans`, and the layout's text among them.

    `texts` come before, between and after the spans: one more than these. `span`: the positions of all tokens, if they
    are more than these. `number`: the texts before and after its number among the prompt's images, or videos, from 0,
    which comes before all else.
    """

    spans: tuple[int, ...]
    texts: tuple[str, ...] = ("", "")
    span: int = 0
    number: tuple[str, str] | None = None

    @property
    def tokens(self) -> int:
        """Image tokens, in total."""
        return sum(self.spans)

    def text(self, image_token: str, number: int = 0) -> str:
        """The prompt's text for image `number`, one image token a span."""
        before = "" if self.number is None else str(number).join(self.number)
        return before + image_token.join(self.texts)


def joined(views: Sequence[ImageTokens], columns: int = 1) -> ImageTokens:
    """The tokens of views, and of newlines, one after the other; `columns` of tiles stand in a row."""
    placed = list[ImageTokens]()
    before = 0
    for number, view in enumerate(views):
        view_indices = view.patches.indices
        indices = np.where(view_indices >= 0, view_indices + before, view_indices)
        numbers = np.where(view_indices == NEWLINE, -1, number)
        placed.append(replace(view, patches=replace(view.patches, indices=indices, views=numbers, frames=None)))
        before += len(view_indices)
    tokens = concatenated(placed)
    towers = [view.tower for view in views if view.tower is not None]
    if not towers:
        return tokens
    states, keys, attention = (
        np.concatenate([getattr(tower, part) for tower in towers]) for part in ("states", "keys", "attention")
    )
    return replace(tokens, tower=TowerTokens(states, keys, attention, columns))


def of_frames(views: Sequence[ImageTokens], views_of_each: int = 1) -> ImageTokens:
    """The tokens of a video from those of its views, `views_of_each` of each frame, and of a newline.

    Frames compete with each other, unlike the views of an image.
    """
    tokens = joined(views)
    assert tokens.patches.views is not None
    frames = tokens.patches.views // views_of_each
    return replace(tokens, patches=replace(tokens.patches, views=None, frames=frames))


def concatenated(parts: Sequence[ImageTokens]) -> ImageTokens:
    """Tokens one after the other, each with its patch as it is; a signal that some lack is 0 there."""
    patches = [part.patches for part in parts]
    widths = {name: signal.shape[1:] for patches_of in patches for name, signal in patches_of.signals.items()}
    signals = {
        name: np.concatenate(
            [patches_of.signals.get(name, np.zeros((len(patches_of), *width), np.float32)) for patches_of in patches]
        )
        for name, width in widths.items()
    }

    def column(name: str) -> Any:
        values = [getattr(patches_of, name) for patches_of in patches]
        return None if any(part is None for part in values) else np.concatenate(values)

    columns = Patches(column("indices"), column("merged"), signals, column("views"), column("frames"))
    hidden = np.concatenate([part.hidden for part in parts])
    idle = sum(part.idle for part in parts)
    offsets = [part.offsets for part in parts if part.offsets is not None]
    if len(offsets) < len(parts):
        return ImageTokens(hidden, columns, idle)
    runs = tuple(run for part in parts for run in part.runs)
    return ImageTokens(hidden, columns, idle, np.concatenate(offsets), parts[0].span, runs=runs)


def share(part: float, count: int) -> int:
    """ceil(part * count), free of the rounding of binary fractions: 0.1 of 30 is 3."""
    return math.ceil(round(part * count, 9))


def highest(values: NDArray[np.float32], count: int) -> Mask:
    """True for the `count` largest of `values` [n]; of equal ones the earlier."""
    mask = np.zeros(len(values), bool)
    mask[np.argsort(-values, kind="stable")[:count]] = True
    return mask


def keys(images: Sequence[Patches], part: float, signal: str = names.CLS_ATTENTION) -> Mask:
    """MustDrop's key tokens: of each view the `part` that its class token looks at most (MustDrop Eq. 6 and 7).

    `signal` names the attention to go by. Of tokens with equal attention the earlier count.
    """
    masks = [np.zeros(0, bool)]
    for image in images:
        masks.append(image.highest_of_each_view(signal, part))
    return np.concatenate(masks)
