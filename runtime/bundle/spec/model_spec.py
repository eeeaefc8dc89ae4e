"""Sizes of a model as its bundle declares them: decoder, vision tower, projector and text tower."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from vtx.runtime.errors import BundleError
from vtx.runtime.strict import optional

MAX_LAYERS = 512
MAX_SIZE = (1 << 31) - 1
MAX_SEGMENT = 1 << 12  # ids of the text tower; CLIP has 77
PARTS = 3  # of a position: time, row and column


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: the kind, its base, and the frequencies [head_dim / 2] from which the tables were made.

    `sections`: how many of the frequencies, one after the other, turn by a position's time, its row and its column;
    empty where a position is one number. A text token's three parts are equal. `scale`: what the tables' cos and sin
    were multiplied by (YaRN's attention factor).
    """

    kind: str
    theta: float
    frequencies: tuple[float, ...]
    sections: tuple[int, ...] = optional(())
    scale: float = optional(1.0)

    def __post_init__(self) -> None:
        _check_sizes("model.rope", self)
        if not all(map(math.isfinite, (*self.frequencies, self.scale))):
            raise BundleError("vtx.json: a frequency of model.rope is not a number; export again")
        sections = self.sections
        if sections and (len(sections) != PARTS or min(sections) < 1 or sum(sections) != len(self.frequencies)):
            raise BundleError(
                f"vtx.json: model.rope.sections {list(sections)!s:.60} do not part {len(self.frequencies)} frequencies "
                f"in {PARTS}; export again"
            )


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision tower. Hidden states are counted from 0, the embeddings; the last of `feature_layers` is the deepest.

    `layers` are those of the checkpoint; the bundle holds them up to the deepest feature layer, or all
    where its vision graph gives the last one's attention. `select`: "default"
    leaves out the first token, whatever it is, "full" keeps what the tower gives. `qkv_bias`: whether q, k and v have
    biases, `layer_scale`: whether a learned scale stands behind each half of a layer. `shuffle`: patches a side of a
    square whose states become one token. `window`: patches a side of windows within which layers attend, but for
    `full_blocks`, counted from 0. `flags` as in `ModelSpec`; with "native" among them images keep their own resolution,
    and `image` is the side of the largest square one.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    image: int
    patch: int
    class_token: bool
    feature_layers: tuple[int, ...]
    select: str
    activation: str
    eps: float
    qkv_bias: bool = optional(True)
    layer_scale: bool = optional(False)
    shuffle: int = optional(1)
    flags: tuple[str, ...] = optional(())
    position_grid: int | None = optional(None)
    window: int | None = optional(None)
    full_blocks: tuple[int, ...] = optional(())

    def __post_init__(self) -> None:
        _check_sizes("model.tower", self)
        windowed = self.window is not None and self.window % self.shuffle == 0
        if (self.window is not None and not windowed) or not all(0 <= n < self.layers for n in self.full_blocks):
            raise BundleError(
                f"vtx.json: windows of {self.window} patches and full blocks {list(self.full_blocks)!s:.60} do not fit "
                f"a tower of {self.layers} layers; export again"
            )
        states, chosen = self.layers + 1, self.feature_layers
        if self.patch > self.image or self.hidden % self.heads:
            raise BundleError(
                f"vtx.json: model.tower: images of {self.image} pixels in patches of {self.patch}, hidden size "
                f"{self.hidden} with {self.heads} heads: sizes are inconsistent; export again"
            )
        if not chosen or not all(0 <= number < states for number in chosen) or self.select not in ("default", "full"):
            raise BundleError(
                f"vtx.json: feature layers {list(chosen)} with {self.select!r:.20} are not among the {states} hidden "
                "states of the tower; export again"
            )

    @property
    def grid(self) -> int:
        """Patches on one side."""
        return self.image // self.patch

    @property
    def used_layers(self) -> int:
        """Layers that features are made of."""
        return max(self.feature_layers)

    @property
    def tokens(self) -> int:
        """Tokens of one pass of the tower, as they leave it."""
        if self.shuffle > 1:
            return (-(-self.grid // self.shuffle)) ** 2
        return self.grid**2 + self.class_token - (self.select == "default")


@dataclass(frozen=True, slots=True)
class ProjectorSpec:
    """Two matrices with an activation between: [intermediate, tower features] and [hidden, intermediate].

    `norm_eps` is that of a norm on the tower's features, None where there is no norm. `layers`: other than two
    matrices, an activation between each two of them.
    """

    intermediate: int
    activation: str
    bias: bool
    norm_eps: float | None = optional(None)
    layers: int = optional(2)

    def __post_init__(self) -> None:
        _check_sizes("model.projector", self)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The decoder's sizes, with those of tower and projector. `tied`: the head is the embedding table.

    `flags` name what else the graphs compute: the exporter's flags, which no runtime needs to know.
    """

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: RopeSpec
    tower: TowerSpec
    projector: ProjectorSpec
    flags: tuple[str, ...] = optional(())

    def __post_init__(self) -> None:
        _check_sizes("model", self)
        if self.layers > MAX_LAYERS:
            raise BundleError(f"vtx.json: {self.layers} layers, the limit is {MAX_LAYERS}; export again")
        if self.heads % self.kv_heads:
            raise BundleError(
                f"vtx.json: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly; export again"
            )
        if 2 * len(self.rope.frequencies) != self.head_dim:
            raise BundleError(
                f"vtx.json: {len(self.rope.frequencies)} rotary frequencies do not fit heads of {self.head_dim}; "
                "export again"
            )


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
        if self.max_tokens > MAX_SEGMENT or self.layers > MAX_LAYERS or self.hidden % self.heads:
            raise BundleError(
                f"vtx.json: text_tower: {self.layers} layers, hidden size {self.hidden} with {self.heads} heads, "
                f"{self.max_tokens} tokens: sizes are inconsistent; export again"
            )


def _check_sizes(where: str, spec: Any) -> None:
    """Raise BundleError unless every whole number is a size (an id from 0 on), and every other one finite."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        least = 0 if field.name == "end_id" else 1
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= MAX_SIZE:
            number = str(value) if -(10**30) < value < 10**30 else "a number of over 30 digits"
            raise BundleError(f"vtx.json: {where}.{field.name} is {number}, outside {least}..{MAX_SIZE}; export again")
        if isinstance(value, float) and not 0 < value < math.inf:
            raise BundleError(f"vtx.json: {where}.{field.name} is {value}, not a positive number; export again")
