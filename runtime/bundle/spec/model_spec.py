"""Sizes of a model as its bundle declares them: decoder, vision tower, projector and text tower."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vtx.runtime.errors import BundleError
from vtx.runtime.strict import UPGRADE, optional

MAX_LAYERS = 512
MAX_SIZE = (1 << 31) - 1
MAX_TAPS = 16  # of a convolution in the decoder
MAX_SEGMENT = 1 << 12  # ids of the text tower; CLIP has 77
PARTS = 3  # of a position: time, row and column
# of a tower's patches: from a table of one grid, stretched to the image's grid, or its nearest entries; by rotation; or
# from two tables, by row and by column
POSITIONS = ("table", "stretched", "nearest", "rotary", "axial")
TWO_WAY = ("prompt", "images")  # tokens that see each other both ways: a prompt's, or those of each image


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: the kind, its base, and the frequencies [head_dim / 2] from which the tables were made.

    `sections`: the numbers of frequencies that rotate by a position's time, its row and its column, in this order;
    empty if a position is one number. The three parts are equal for text. `interleaved`: they take turns, as long as
    row or column has frequencies left; time has the rest. `scale`: the factor of the tables' cos and sin (YaRN's
    attention factor).
    """

    kind: str
    theta: float
    frequencies: tuple[float, ...]
    sections: tuple[int, ...] = optional(())
    scale: float = optional(1.0)
    interleaved: bool = optional(False)

    def __post_init__(self) -> None:
        _check_sizes("model.rope", self)
        require(all(map(math.isfinite, self.frequencies)), "a frequency of model.rope is not a number")
        sections = self.sections
        count = len(self.frequencies)
        require(
            not sections or (len(sections) == PARTS and min(sections) >= 1 and sum(sections) == count),
            f"model.rope.sections {list(sections)!s:.60} do not divide {count} frequencies in {PARTS}",
        )

    @property
    def axes(self) -> tuple[int, ...]:
        """The part of a position that each frequency rotates by; empty if a position is one number."""
        if self.interleaved:
            turns = ((number % PARTS, number) for number in range(sum(self.sections)))
            return tuple(part if part and number < PARTS * self.sections[part] else 0 for part, number in turns)
        return tuple(part for part, count in enumerate(self.sections) for _ in range(count))


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """Decoder layers, counted from 1, whose tokens see only the last `window` positions, their own included.

    `head_dim` is theirs; other layers have the model's.
    """

    layers: tuple[int, ...]
    window: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SlidingSpec(SlidingLayers):
    """With the rotary embedding of these layers."""

    rope: RopeSpec

    def __post_init__(self) -> None:
        _check_sizes("model.sliding", self)
        fits = not self.rope.sections and 2 * len(self.rope.frequencies) == self.head_dim
        require(
            fits, f"model.sliding: {len(self.rope.frequencies)} rotary frequencies do not fit heads of {self.head_dim}"
        )


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The gated delta rule of decoder layers: heads of keys and of values, and their sizes.

    A key head, with its queries, serves `value_heads / key_heads` value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check_sizes("model.delta", self)
        require(
            self.value_heads % self.key_heads == 0,
            f"model.delta: {self.value_heads} value heads cannot share {self.key_heads} key heads evenly",
        )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Those that are convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def memory(self) -> int:
        """Numbers of a layer's matrices from keys to values."""
        return self.value_heads * self.key_dim * self.value_dim


class Attending(Protocol):
    """The part of a decoder that `unscored` reads."""

    @property
    def two_way(self) -> str | None: ...

    @property
    def conv_layers(self) -> tuple[int, ...]: ...

    def slides(self, layer: int) -> bool: ...


def unscored(decoder: Attending, layer: int) -> str:
    """The reason why the attention that a layer gives to image tokens cannot rank them; empty: it can."""
    if decoder.two_way == "prompt":
        return "the image tokens of this model also attend to the question"
    if layer in decoder.conv_layers:
        return f"layer {layer} of this model keeps a state in place of attention"
    return f"layer {layer} of this model has a sliding window" if decoder.slides(layer) else ""


class ByLayer:
    """Properties of a decoder layer by its number, counted from 1.

    `sliding`: the layers with a window, None if there are none. `shared`: the first of the layers, up to the last one,
    that have no keys and values of their own and read those of the last layer before it that slides as they do.
    """

    __slots__ = ()
    layers: int
    hidden: int
    head_dim: int
    sliding: SlidingLayers | None
    shared: int | None
    conv_taps: int
    delta: DeltaSpec | None

    @property
    def convolved(self) -> int:
        """Channels of the convolution in a layer that has one."""
        return self.hidden if self.delta is None else self.delta.channels

    @property
    def state_numbers(self) -> int:
        """Numbers of the state of a layer with a convolution: its last columns, then the delta rule's matrices."""
        return (self.conv_taps - 1) * self.convolved + (0 if self.delta is None else self.delta.memory)

    def slides(self, layer: int) -> bool:
        return self.sliding is not None and layer in self.sliding.layers

    def heads_of(self, layer: int) -> int:
        """The size of a layer's heads."""
        return self.sliding.head_dim if self.sliding is not None and layer in self.sliding.layers else self.head_dim

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, unless it shares those of an earlier one."""
        if self.shared is None or layer < self.shared:
            return layer
        return max(n for n in range(1, self.shared) if self.slides(n) == self.slides(layer))

    @property
    def first_source(self) -> int | None:
        """The first layer whose keys and values later ones share, from which on tokens that leave would stay there."""
        if self.shared is None:
            return None
        return min(self.source(layer) for layer in range(self.shared, self.layers + 1))

    @property
    def mean_head_dim(self) -> float:
        """The size of heads, the mean over the layers that keep keys and values."""
        widths = [self.heads_of(layer) for layer in range(1, self.shared or self.layers + 1)]
        return sum(widths) / len(widths)

    def sources(self, first: int, last: int) -> tuple[int, ...]:
        """The layers before `first` whose keys and values the layers from it to `last` read."""
        sources = {self.source(layer) for layer in range(first, last + 1)}
        return tuple(sorted(layer for layer in sources if layer < first))


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """The facts that a runtime needs of a vision tower of `layers` layers.

    `image` is the side of its images, or of the largest square one, in pixels, `patch` that of a patch; `square` is the
    side, in patches, of a square that becomes one token, `pool` of one whose states are averaged to one token. One pass
    has `states` hidden states, whose features have `state_width` numbers, the mean over heads of their keys
    `key_width`, and gives `tokens` tokens. `several`: features of several towers are joined. `positions`: how patches
    get theirs, one of `POSITIONS`; with all but "table" images keep native resolution.
    """

    layers: int
    image: int
    patch: int
    square: int
    pool: int
    tokens: int
    states: int
    state_width: int
    key_width: int
    class_token: bool
    several: bool
    positions: str

    def __post_init__(self) -> None:
        _check_sizes("model.tower", self)
        require(self.positions in POSITIONS, f"model.tower has unknown positions, {self.positions!r:.40}")
        require(
            self.patch <= self.image,
            f"model.tower: images of {self.image} pixels are smaller than patches of {self.patch}",
        )

    @property
    def grid(self) -> int:
        """Patches on one side."""
        return self.image // self.patch

    def class_first(self, tokens: int) -> bool:
        """True if the first of a view's `tokens` is the class token: no hidden state was left out."""
        return self.class_token and tokens == self.states


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The rest of the configuration of the decoder, and that of the tower with its projector.

    Tools and the exporter read them, no runtime does.
    """

    text: dict[str, Any]
    vision: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSpec(ByLayer):
    """The facts that a runtime needs of a model's decoder and of its tower.

    `sliding` and `shared` as in `ByLayer`. `two_way`: the tokens that see each other both ways,
    one of `TWO_WAY`; None: every token sees itself and those before.
    `conv_layers`, counted from 1, have in place of attention a convolution over `conv_taps` tokens each, the last one
    the token itself; with `delta`, the gated delta rule follows the convolution.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    eps: float
    rope: RopeSpec
    tower: TowerSpec
    parts: ModelParts
    two_way: str | None = optional(None)
    conv_layers: tuple[int, ...] = optional(())
    conv_taps: int = optional(1)
    delta: DeltaSpec | None = optional(None)
    sliding: SlidingSpec | None = optional(None)
    shared: int | None = optional(None)

    def __post_init__(self) -> None:
        _check_sizes("model", self)
        convolved = list(self.conv_layers)
        require(
            all(1 <= layer <= self.layers for layer in convolved)
            and convolved == sorted({*convolved})
            and (not convolved or 2 <= self.conv_taps <= MAX_TAPS),
            f"convolutions of {self.conv_taps} taps in the layers {convolved!s:.60} do not fit {self.layers} layers; "
            f"they have 2 to {MAX_TAPS} taps",
        )
        require(self.delta is None or bool(convolved), "model.delta is for layers with a convolution, and none has one")
        require(not convolved or self.state_numbers <= MAX_SIZE, f"a layer's state has more than {MAX_SIZE} numbers")
        require(self.layers <= MAX_LAYERS, f"{self.layers} layers, the limit is {MAX_LAYERS}")
        kv_heads = self.kv_heads
        frequencies = len(self.rope.frequencies)
        if self.two_way not in (None, *TWO_WAY):
            raise BundleError(
                f"vtx.json: tokens that see each other both ways are {self.two_way!r:.40}, unknown to this vtx, which "
                f"has {', '.join(TWO_WAY)}; {UPGRADE}"
            )
        require(self.heads % kv_heads == 0, f"{self.heads} heads cannot share {kv_heads} key/value heads evenly")
        fits = 2 * frequencies == self.head_dim
        require(fits, f"{frequencies} rotary frequencies do not fit heads of {self.head_dim}")
        self._check_windows()

    def _check_windows(self) -> None:
        """Raise BundleError unless windows and shared K and V fit the layers."""
        sliding = self.sliding
        shared = self.shared
        windows = set() if sliding is None else {*sliding.layers}
        require(
            windows <= {*range(1, self.layers + 1)} and (sliding is None or bool(windows)),
            f"model.sliding names layers {sorted(windows)!s:.60} of {self.layers}",
        )
        kinds = [
            {layer in windows for layer in layers} for layers in (range(1, shared or 1), range(1, self.layers + 1))
        ]
        require(
            shared is None or (1 < shared <= self.layers and kinds[0] == kinds[1]),
            f"model.shared is {shared}, and each layer from it to the last, {self.layers}, needs one like it before",
        )

    @property
    def attending(self) -> int:
        """The number of layers with attention, which alone keep K and V."""
        return self.layers - len(self.conv_layers)


@dataclass(frozen=True, slots=True)
class TextTowerSpec:
    """CLIP's text encoder: up to `max_tokens` ids become a vector of `width`, in one space with the patches.

    `tokenizer` is its own tokenizer's file. A segment of ids counts up to its first `end_id`, or up to its highest id
    if that is None, as in CLIPs whose configuration says eos_token_id 2. `vision_eps` is the one of the norm before the
    projection of patches.
    """

    tokenizer: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    max_tokens: int
    width: int
    activation: str
    eps: float
    vision_eps: float
    end_id: int | None

    def __post_init__(self) -> None:
        _check_sizes("text_tower", self)
        require(
            self.max_tokens <= MAX_SEGMENT and self.layers <= MAX_LAYERS and self.hidden % self.heads == 0,
            f"text_tower: {self.layers} layers, hidden size {self.hidden} with {self.heads} heads, {self.max_tokens} "
            "tokens: sizes are inconsistent",
        )


def _check_sizes(where: str, spec: Any) -> None:
    """Raise BundleError unless every whole number is a size (an id from 0 on), and every other one finite."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        least = 0 if field.name.endswith("_id") else 1
        if isinstance(value, int) and not isinstance(value, bool):
            number = str(value) if -(10**30) < value < 10**30 else "a number of over 30 digits"
            require(least <= value <= MAX_SIZE, f"{where}.{field.name} is {number}, outside {least}..{MAX_SIZE}")
        if isinstance(value, float):
            require(0 < value < math.inf, f"{where}.{field.name} is {value}, not a positive number")


def require(holds: bool, problem: str) -> None:
    """Raise BundleError for a manifest with this problem unless `holds`."""
    if not holds:
        raise BundleError(f"vtx.json: {problem}; export again")
