"""Places of K and V of a stage's layers in a buffer: layers whose heads have one size are a region of equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.runtime.backends.cuda import Cuda, aligned
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Region:
    """Parts [slots, kv_heads, head_dim], each layer's keys, then its values, from `address` on, `pitch` bytes apart.

    `row`: bytes of one slot in a part.
    """

    layers: tuple[int, ...]
    row: int
    address: int
    pitch: int

    @property
    def parts(self) -> int:
        return 2 * len(self.layers)

    @property
    def end(self) -> int:
        return self.address + self.parts * self.pitch

    def at(self, slot: int) -> Region:
        """The same parts from that slot on."""
        return Region(self.layers, self.row, self.address + slot * self.row, self.pitch)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The regions of a stage's K and V, by the bytes of a slot of their layers."""

    layers: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: ModelSpec, spec: StageSpec, itemsize: int) -> KVLayout:
        """`itemsize`: bytes of a number of K and V."""
        layers_of = dict[int, list[int]]()
        for layer in spec.cached:
            layers_of.setdefault(model.kv_heads * model.heads_of(layer) * itemsize, []).append(layer)
        return cls(tuple((row, tuple(layers)) for row, layers in layers_of.items()))

    @property
    def rows(self) -> list[int]:
        """Bytes of one slot of a layer's K or V, of each region."""
        return [row for row, _ in self.layers]

    def regions(self, address: int, slots: int, *, packed: bool = False) -> list[Region]:
        """In a buffer of `slots` slots at `address`; parts are aligned unless they are `packed`."""
        out = list[Region]()
        for row, layers in self.layers:
            out.append(Region(layers, row, address, slots * row if packed else aligned(slots * row)))
            address = out[-1].end
        return out

    def nbytes(self, slots: int, *, packed: bool = False) -> int:
        """Bytes of a buffer of `slots` slots."""
        regions = self.regions(0, slots, packed=packed)
        return regions[-1].end if regions else 0


def part(regions: Sequence[Region], layer: int, half: int) -> int:
    """The address of a layer's keys, `half` 0, or values, 1."""
    region = next(region for region in regions if layer in region.layers)
    return region.address + (2 * region.layers.index(layer) + half) * region.pitch


def copy_slots(cuda: Cuda, to: Sequence[Region], source: Sequence[Region], slots: int) -> None:
    """Queue a copy of the first `slots` slots of every part."""
    for into, out_of in zip(to, source, strict=True):
        cuda.copy_rows(into.address, into.pitch, out_of.address, out_of.pitch, slots * into.row, into.parts)
