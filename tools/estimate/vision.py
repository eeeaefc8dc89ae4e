"""The sizes of a vision tower, with its projector and the image that it sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from vtx.runtime.bundle.spec.stored import multiplied
from vtx.runtime.strict import optional
from vtx.tools.model.tensors import products
from vtx.tools.model.towers import tower_of
from vtx.tools.model.towers.tower import Tower
from vtx.tools.model.vision import VisionModel

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VisionSize:
    """A tower before a decoder of `out` channels, and an image that it sees.

    One view is one pass of the tower: `patches` patches, from which `view_tokens` tokens are made. One image takes
    `views` views and `image_tokens` tokens of the prompt; it is the largest one if its size is free. `towers` counts
    towers with weights of their own. `last_attention`: all layers are exported, not only those up to the last feature.
    """

    model: VisionModel
    out: int
    patches: int
    view_tokens: int
    image_tokens: int
    views: int = optional(1)
    towers: int = optional(1)
    last_attention: bool = optional(False)

    @property
    def tower(self) -> Tower:
        return tower_of(self.model)

    @property
    def layers(self) -> int:
        return self.model.vision.layers

    @property
    def used(self) -> int:
        """The layers that are exported."""
        return self.layers if self.last_attention else self.tower.used

    def seeing(self, tokens: int) -> VisionSize:
        """The tower as it sees an image of that many tokens: the same for every image if their size is fixed."""
        vision = self.model.vision
        if vision.positions == "table":
            return self
        views = 1
        if vision.naflex:
            views = max(1, -(-tokens // self.view_tokens))
        else:
            tokens = min(tokens, self.image_tokens)
        view_tokens = max(1, -(-tokens // views))
        patches = vision.square**2 * view_tokens
        return replace(self, patches=patches, view_tokens=view_tokens, image_tokens=views * view_tokens, views=views)

    def stretched(self, patches: int) -> VisionSize:
        """The tower as it sees a view of that many patches, which may be more than an image has."""
        return replace(self, patches=patches, view_tokens=patches // self.model.vision.square**2)

    @property
    def tower_tokens(self) -> int:
        return self.tower.tokens(self.patches)

    @property
    def widest(self) -> int:
        """Numbers that a layer holds for one view."""
        return self.tower.widest(self.patches)

    @property
    def apart(self) -> int:
        """As `widest`, if nothing takes the memory of another."""
        return self.tower.apart(self.patches)

    @property
    def ends(self) -> int:
        """Numbers that go into the tower for one view and out of it: pixels, and tokens with their maps."""
        vision = self.model.vision
        pixels = self.tower.moments * self.patches * 3 * vision.patch**2
        return pixels + (1 + len(vision.maps)) * self.view_tokens * self.out

    @property
    def layer_macs(self) -> int:
        """One layer of the tower for one view, attention products included."""
        return self.tower.layer_macs(self.tower_tokens)

    @property
    def projector_macs(self) -> int:
        """The projector for one token."""
        return products(self.tower.projector(self.out))

    @property
    def parameters(self) -> int:
        """Weights of the exported part of the towers, and of the projector."""
        return sum(count * prod(shape) for shape, count in self.weights().items())

    def weights(self) -> Mapping[Shape, int]:
        """Shapes of the matrices [out, in] and the number of each; all other weights count as one vector."""
        return _weights(replace(self, patches=0, view_tokens=0, image_tokens=0, views=1))


@cache
def _weights(size: VisionSize) -> Mapping[Shape, int]:
    shapes = Counter[Shape]()
    rest = 0
    tower = size.tower.tensors(last_attention=size.last_attention)
    for count, tensors in ((size.towers, tower), (1, size.tower.projector(size.out))):
        for name, shape in tensors:
            if multiplied(name, shape):
                shapes[shape] += count
            else:
                rest += count * prod(shape)
    return {**shapes, (rest,): 1}
