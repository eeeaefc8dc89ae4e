"""Sizes of vision towers and the projectors behind them: what their cost depends on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from vtx.runtime.strict import optional
from vtx.tools.model.vision import MERGED

STEM, ATTENDING, KERNEL, WIDER, SQUEEZED = 4, 2, 49, 4, 16  # as in exporter/graphs/convolutional.py
MOMENTS = 2  # of a video that a patch's kernel covers; an image fills both
Matrices = Iterator[tuple[tuple[int, int], int]]  # shapes [out, in], and the number of matrices that have each


def block_matrices(hidden: int, ffn: int, layers: int, *, gated: bool = False) -> Matrices:
    """The matrices of a transformer's layers."""
    yield (hidden, hidden), 4 * layers
    yield (ffn, hidden), (1 + gated) * layers
    yield (hidden, ffn), layers


@dataclass(frozen=True, slots=True)
class VisionSize:
    """A CLIP or SigLIP tower, and the projector behind it.

    One view is one pass of a tower: `patches` patches of `patch` x `patch` RGB pixels. `layers` are all layers
    of the tower, `used` those up to the last feature layer, which alone are exported. `view_tokens` tokens of
    `features` hidden states each are projected to `out` columns. One image takes `views` views and `image_tokens`
    tokens of the prompt. `towers` counts towers with weights of their own, `projector_layers` the projector's matrices.
    """

    layers: int
    used: int
    hidden: int
    ffn: int
    patches: int
    patch: int
    class_token: bool
    features: int
    view_tokens: int
    image_tokens: int
    out: int
    views: int = 1
    towers: int = 1
    projector_bias: bool = True
    projector_layers: int = 2
    several = False  # towers' features are joined

    def tower_matrices(self) -> Matrices:
        """Those of the exported part of the towers, without the patches' kernel."""
        yield from block_matrices(self.hidden, self.ffn, self.towers * self.used)

    def projector_matrices(self) -> Matrices:
        yield (self.out, self.features * self.hidden), 1
        yield (self.out, self.out), self.projector_layers - 1

    def seeing(self, tokens: int) -> VisionSize:
        """The tower as it sees an image of that many tokens: the same for every image."""
        return self

    @property
    def tower_tokens(self) -> int:
        return self.patches + self.class_token

    @property
    def widest(self) -> int:
        """Numbers that a layer holds for one view: two residual vectors a token, and q, k, v or the MLP's vectors."""
        return self.tower_tokens * (2 * self.hidden + max(4 * self.hidden, 2 * self.ffn))

    @property
    def apart(self) -> int:
        """As `widest`, if nothing takes the memory of another: with q, k, v, two of them rotated, and the MLP's."""
        return self.tower_tokens * (2 * self.hidden + 6 * self.hidden + 2 * self.ffn)

    @property
    def ends(self) -> int:
        """Numbers that go into the tower for one view and out of it: pixels, and tokens."""
        return self.patches * 3 * self.patch**2 + self.view_tokens * self.out

    @property
    def layer_macs(self) -> int:
        """One layer of the tower for one view, attention products included."""
        return self.layer_macs_on(self.tower_tokens)

    def layer_macs_on(self, tokens: int) -> int:
        h = self.hidden
        return tokens * (4 * h * h + 2 * h * self.ffn) + 2 * tokens * tokens * h

    @property
    def patch_macs(self) -> int:
        return self.patches * self.hidden * 3 * self.patch * self.patch

    @property
    def projector_token_macs(self) -> int:
        return sum(out * into * count for (out, into), count in self.projector_matrices())

    @property
    def parameters(self) -> int:
        """Weights of the exported part of the towers, and of the projector."""
        h = self.hidden
        layer = 4 * h * h + 2 * h * self.ffn + 4 * h + self.ffn + h + 4 * h
        embeddings = h * 3 * self.patch * self.patch + self.tower_tokens * h + (3 * h if self.class_token else h)
        projector = self.projector_token_macs + self.projector_bias * self.projector_layers * self.out
        return self.towers * (self.used * layer + embeddings) + projector + self.further_norms

    @property
    def further_norms(self) -> int:
        """Weights of norms behind the tower's blocks and before the projector."""
        return 0


@dataclass(frozen=True, slots=True)
class NativeSize(VisionSize):
    """A tower with rotary positions, windows of up to `window` patches in all but `whole` layers, and a merger.

    `gated`: three matrices in place of two between the attentions, and norms without biases. `maps`: further mergers,
    for the first layers of the decoder. `positions`: of a learned table; patches then have a bias. `patches`,
    `view_tokens` and `image_tokens` describe the largest image.
    """

    gated: bool = False
    window: int = 1
    whole: int = 1
    maps: int = optional(0)
    positions: int = optional(0)

    def tower_matrices(self) -> Matrices:
        yield from block_matrices(self.hidden, self.ffn, self.layers, gated=self.gated)

    def projector_matrices(self) -> Matrices:
        """Of the merger, and of those of maps."""
        yield (self.wide, self.wide), 1 + self.maps
        yield (self.out, self.wide), 1 + self.maps

    def seeing(self, tokens: int) -> NativeSize:
        tokens = max(1, min(tokens, self.image_tokens))
        return replace(self, patches=self.features * tokens, view_tokens=tokens, image_tokens=tokens)

    def of_pixels(self, pixels: int) -> NativeSize:
        """The tower as it sees that many pixels, which may be more than an image has."""
        patches = pixels // self.patch**2
        tokens = patches // self.features
        return replace(self, patches=patches, view_tokens=tokens, image_tokens=tokens)

    @property
    def ends(self) -> int:
        """Numbers that go into the tower and out of it: pixels of both moments, and tokens with their maps."""
        return MOMENTS * self.patches * 3 * self.patch**2 + (1 + self.maps) * self.view_tokens * self.out

    @property
    def tower_tokens(self) -> int:
        return self.patches

    def layer_macs_on(self, tokens: int) -> int:
        """One layer of the tower for that number of patches: the mean of those with windows and those without."""
        h = self.hidden
        seen = (self.whole * tokens + (self.layers - self.whole) * min(tokens, self.window)) // self.layers
        return tokens * (4 * h * h + (2 + self.gated) * h * self.ffn) + 2 * tokens * seen * h

    @property
    def wide(self) -> int:
        """Width between the merger's matrices."""
        return self.features * self.hidden

    @property
    def parameters(self) -> int:
        h, norm = self.hidden, self.hidden * (1 if self.gated else 2)
        matrices = 4 * h * h + (2 + self.gated) * h * self.ffn
        layer = matrices + 4 * h + (1 + self.gated) * self.ffn + h + 2 * norm
        biases = (1 + self.maps) * (self.wide + self.out)
        mergers = self.projector_token_macs + biases + norm + self.maps * 2 * self.wide
        learned = (self.positions + 1) * h if self.positions else 0
        return self.layers * layer + MOMENTS * h * 3 * self.patch**2 + learned + mergers


@dataclass(frozen=True, slots=True)
class NaflexSize(VisionSize):
    """A SigLIP tower of images at native resolution or in tiles, with a table of `positions` and a final norm.

    The projector has a width of `between` between its matrices, and a norm before them if `projector_norm`. `patches`
    and `view_tokens` describe a tile. `merged_after`: after that many layers squares of `MERGED` x `MERGED` patches
    attend within themselves and become one.
    """

    between: int = 1
    positions: int = 1
    projector_norm: bool = True
    merged_after: int | None = optional(None)

    def tower_matrices(self) -> Matrices:
        yield from block_matrices(self.hidden, self.ffn, self.used)
        if self.merged_after is not None:
            yield (self.hidden, self.hidden), 4
            yield from ((shape, 1) for shape in self.merger())

    def projector_matrices(self) -> Matrices:
        yield (self.between, self.features * self.hidden), 1
        yield (self.out, self.between), 1

    def seeing(self, tokens: int) -> NaflexSize:
        views = max(1, -(-tokens // self.view_tokens))
        each = max(1, -(-tokens // views))
        patches = self.features * each * (1 if self.merged_after is None else MERGED**2)
        return replace(self, patches=patches, view_tokens=each, image_tokens=views * each, views=views)

    def stretched(self, times: int) -> NaflexSize:
        """The tower as it sees a view of `times` the pixels of a tile, as an engine takes memory for one."""
        return replace(self, patches=times * self.patches, view_tokens=times * self.view_tokens)

    def merger(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices of the MLP that makes one patch of those of a square."""
        if self.merged_after is None:
            return ()
        wide, ffn = MERGED**2 * self.hidden, MERGED**2 * self.ffn
        return (ffn, wide), (self.hidden, ffn)

    def layer_macs_on(self, tokens: int) -> int:
        """One layer of the tower: the mean of those before and behind the merger, with its share of the merger."""
        if self.merged_after is None:
            return VisionSize.layer_macs_on(self, tokens)
        h, each = self.hidden, MERGED**2
        before, behind = (VisionSize.layer_macs_on(self, count) for count in (tokens, tokens // each))
        merger = tokens * (4 * h * h + 2 * each * h) + tokens // each * sum(a * b for a, b in self.merger())
        return (self.merged_after * before + (self.used - self.merged_after) * behind + merger) // self.used

    @property
    def parameters(self) -> int:
        h, wide = self.hidden, self.features * self.hidden
        layer = 4 * h * h + 2 * h * self.ffn + 4 * h + self.ffn + h + 4 * h
        embeddings = h * 3 * self.patch**2 + h + self.positions * h
        projector = self.projector_token_macs + self.projector_bias * (self.between + self.out)
        merger = sum(out * (into + 1) for out, into in self.merger())
        merger += 4 * h * (h + 1) + 2 * h + 2 * MERGED**2 * h if merger else 0
        return self.used * layer + embeddings + 2 * h + projector + self.projector_norm * 2 * wide + merger


@dataclass(frozen=True, slots=True)
class PooledSize(VisionSize):
    """A SigLIP tower with a norm behind it, whose states are averaged in squares to tokens, which have a norm, too.

    `pool` is the side of a square, in patches.
    """

    pool: int = 1

    @property
    def further_norms(self) -> int:
        return 3 * self.hidden


@dataclass(frozen=True, slots=True)
class AxialSize(VisionSize):
    """A tower of images at native resolution, with tables of `axis_positions` for rows and for columns.

    A token is the mean of `square` patches. Blocks have four norms, no biases, and an MLP of three matrices; `clipped`:
    each matrix has four bounds; `standardised`: means have a bias and a scale. `patches`, `view_tokens` and
    `image_tokens` describe the largest image.
    """

    axis_positions: int = 1
    square: int = 1
    heads: int = 1
    clipped: bool = False
    standardised: bool = False

    def tower_matrices(self) -> Matrices:
        yield from block_matrices(self.hidden, self.ffn, self.layers, gated=True)

    def seeing(self, tokens: int) -> AxialSize:
        tokens = max(1, min(tokens, self.image_tokens))
        return replace(self, patches=self.square * tokens, view_tokens=tokens, image_tokens=tokens)

    @property
    def tower_tokens(self) -> int:
        return self.patches

    def layer_macs_on(self, tokens: int) -> int:
        h = self.hidden
        return tokens * (4 * h * h + 3 * h * self.ffn) + 2 * tokens * tokens * h

    @property
    def parameters(self) -> int:
        h = self.hidden
        layer = 4 * h * h + 3 * h * self.ffn + 4 * h + 2 * h // self.heads + self.clipped * 7 * 4
        embeddings = h * 3 * self.patch**2 + 2 * self.axis_positions * h + self.standardised * 2 * h
        return self.layers * layer + embeddings + self.projector_token_macs


@dataclass(frozen=True, slots=True)
class PairedSize(VisionSize):
    """A tower with `registers` and a second one beside it, whose features are joined; `layers` are the first one's.

    The projector has the widths `projected` between its matrices.
    """

    beside: VisionSize | None = None
    registers: int = 0
    projected: tuple[int, ...] = ()
    several = True

    def tower_matrices(self) -> Matrices:
        for tower in (self, self.second):
            yield from block_matrices(tower.hidden, tower.ffn, tower.used)

    @property
    def second(self) -> VisionSize:
        assert self.beside is not None, "a pair has two towers"
        return self.beside

    @property
    def tower_tokens(self) -> int:
        return self.patches + self.class_token + self.registers

    def layer_macs_on(self, tokens: int) -> int:
        """A layer of the first tower, with its share of the second's."""
        other = self.second.used * self.second.layer_macs // self.used
        return VisionSize.layer_macs_on(self, tokens) + other

    @property
    def patch_macs(self) -> int:
        return self.patches * (self.hidden + self.second.hidden) * 3 * self.patch * self.patch

    def projector_matrices(self) -> Matrices:
        widths = self.features * self.hidden + self.second.hidden, *self.projected, self.out
        yield from (((out, into), 1) for into, out in pairwise(widths))

    @property
    def parameters(self) -> int:
        towers = 0
        for size, scales, prefix in ((self, 2, 1 + self.registers), (self.second, 0, 0)):
            h = size.hidden
            layer = 4 * h * h + 2 * h * size.ffn + 4 * h + size.ffn + h + 4 * h + scales * h
            towers += size.used * layer + h * (3 * self.patch * self.patch + 1) + (self.patches + prefix) * h
        biases = sum(out for (out, _), _ in self.projector_matrices())
        return towers + self.projector_token_macs + self.projector_bias * biases


@dataclass(frozen=True, slots=True)
class ConvolutionalSize(VisionSize):
    """A tower of convolutions in stages, which counts as one layer; the last `ATTENDING` stages have attention."""

    blocks: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def tower_matrices(self) -> Matrices:
        """Of attention alone: others are convolutions."""
        for blocks, width in [*zip(self.blocks, self.widths, strict=True)][-ATTENDING:]:
            yield from (((3 * width, width), blocks), ((width, width), blocks))

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Weights of convolutions and matrices, the places that they are at, and other weights: biases and norms."""
        side = self.patch * math.isqrt(self.patches) // STEM
        first = self.widths[0]
        yield 27 * first, 4 * side**2, first
        yield 9 * first + first * first, side**2, 2 * first
        for stage, (blocks, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
            places, attends = (side >> stage) ** 2, stage >= len(self.blocks) - ATTENDING
            if stage:
                yield (KERNEL + width) * width, places, 2 * width
            if attends:
                yield KERNEL * width, places, width
            mixer = 4 * width * width if attends else 9 * width
            weights = mixer + (KERNEL + 2 * WIDER * width) * width
            small = 4 * width + WIDER * width + 2 * width + (4 * width if attends else width)
            yield blocks * weights, places, blocks * small
        squeezed = self.hidden // SQUEEZED
        yield 9 * self.hidden, self.patches, self.hidden
        yield 2 * squeezed * self.hidden, 1, squeezed + self.hidden

    def layer_macs_on(self, tokens: int) -> int:
        """The whole tower for one view, attention products included."""
        products, stages = 0, len(self.blocks)
        for stage in range(stages - ATTENDING, stages):
            places = self.patches << 2 * (stages - 1 - stage)
            products += 2 * places**2 * self.widths[stage] * self.blocks[stage]
        return products + sum(weights * places for weights, places, _ in self._parts())

    @property
    def widest(self) -> int:
        side = self.patch * math.isqrt(self.patches) // STEM
        return side**2 * self.widths[0] * (2 + 2 * WIDER)

    @property
    def apart(self) -> int:
        return self.widest

    @property
    def patch_macs(self) -> int:
        return 0

    @property
    def parameters(self) -> int:
        projector = self.projector_token_macs + self.projector_bias * self.projector_layers * self.out
        return sum(weights + small for weights, _, small in self._parts()) + projector


@dataclass(frozen=True, slots=True)
class TowerPart:
    """One of the towers whose features are joined: by `family` a CLIP, ConvNeXt, SAM, EVA-02 or Pix2Struct.

    `patches` of `patch` x `patch` pixels attend to each other in `whole` of the `layers`, else within windows of
    `window` patches. `blocks` and `widths` are of ConvNeXt's stages. `positions` are the entries of the tables of
    positions, `neck` the channels behind SAM's layers.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    patches: int
    patch: int
    whole: int
    window: int | None = optional(None)
    blocks: tuple[int, ...] = optional(())
    widths: tuple[int, ...] = optional(())
    positions: int = optional(0)
    neck: int | None = optional(None)

    @property
    def side(self) -> int:
        return math.isqrt(self.patches)

    @property
    def padded(self) -> int:
        """Patches of all windows, which extend beyond the last rows and columns."""
        if self.window is None:
            return self.patches
        window = math.isqrt(self.window)
        return (-(-self.side // window) * window) ** 2

    def matrices(self) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Shapes of the matrices [out, in], their numbers, and the places that each is at."""
        h, f, n, at = self.hidden, self.ffn, self.layers, self.patches
        if self.family == "convnext":
            for stage, (blocks, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
                places = self.patches << 2 * (len(self.widths) - 1 - stage)
                yield from (((WIDER * width, width), blocks, places), ((width, WIDER * width), blocks, places))
            return
        gated = self.family in ("eva02", "pix2struct")
        yield from (((f, h), (1 + gated) * n, at), ((h, f), n, at))
        for count, places in ((self.whole, at), (n - self.whole, self.padded)):
            if self.family == "sam":
                yield from (((3 * h, h), count, places), ((h, h), count, places))
            else:
                yield (h, h), 4 * count, places

    def convolutions(self) -> Iterator[tuple[int, int]]:
        """Weights of convolutions, and the places that they are at."""
        if self.family != "convnext":
            yield 3 * self.patch**2 * self.hidden, self.patches
            yield self.hidden * (self.neck or 0), self.patches
            return
        before = self.widths[0]
        yield 3 * STEM**2 * before, self.patches << 2 * (len(self.widths) - 1)
        for stage, (blocks, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
            places = self.patches << 2 * (len(self.widths) - 1 - stage)
            yield 4 * before * width * bool(stage), places
            yield blocks * KERNEL * width, places
            before = width

    @property
    def small(self) -> int:
        """Weights of norms, biases, scales and tables."""
        h, f, n = self.hidden, self.ffn, self.layers
        if self.family == "convnext":
            downsampling = sum(2 * before + after for before, after in pairwise(self.widths))
            blocks = sum(count * (5 + WIDER) * width for count, width in zip(self.blocks, self.widths, strict=True))
            return 3 * self.widths[0] + downsampling + blocks
        tables = self.positions * h
        if self.family == "clip":
            return tables + 2 * h + n * (9 * h + f)
        if self.family == "sam":
            sides = self.whole * self.side + (n - self.whole) * (math.isqrt(self.window) if self.window else 0)
            apart = 2 * (2 * sides - n) * (h // self.heads)
            return tables + h + n * (9 * h + f) + apart + 2 * (self.neck or 0)
        if self.family == "eva02":
            return tables + h + n * (8 * h + 4 * f)
        return tables + h + n * 2 * h + h

    @property
    def weights(self) -> int:
        matrices = sum(count * out * into for (out, into), count, _ in self.matrices())
        return matrices + sum(count for count, _ in self.convolutions()) + self.small

    @property
    def macs(self) -> int:
        """Of one picture, products of attention included."""
        total = sum(count * out * into * places for (out, into), count, places in self.matrices())
        total += sum(count * places for count, places in self.convolutions())
        if self.family != "convnext":
            seen = self.whole * self.patches**2 + (self.layers - self.whole) * self.padded * (self.window or 0)
            total += 2 * seen * self.hidden
        return total

    @property
    def widest(self) -> int:
        """Numbers that a layer holds: of ConvNeXt's first stage, or as `VisionSize.widest`."""
        if self.family == "convnext":
            return (self.patches << 2 * (len(self.widths) - 1)) * self.widths[0] * (2 + 2 * WIDER)
        return self.padded * (2 * self.hidden + max(4 * self.hidden, 2 * self.ffn))


@dataclass(frozen=True, slots=True)
class JoinedSize(VisionSize):
    """Several towers over one picture, whose features are joined; together they count as one layer.

    `patches` are places of the grid that the features are stretched to, and `patch` is the side of one.
    """

    parts: tuple[TowerPart, ...] = ()
    several = True

    def tower_matrices(self) -> Matrices:
        for part in self.parts:
            yield from ((shape, count) for shape, count, _ in part.matrices())

    def layer_macs_on(self, tokens: int) -> int:
        """All towers for one view."""
        return sum(part.macs for part in self.parts)

    @property
    def widest(self) -> int:
        return max(part.widest for part in self.parts) + self.patches * self.hidden

    @property
    def apart(self) -> int:
        return self.widest

    @property
    def patch_macs(self) -> int:
        return 0

    @property
    def parameters(self) -> int:
        projector = self.projector_token_macs + self.projector_bias * self.projector_layers * self.out
        return sum(part.weights for part in self.parts) + projector
