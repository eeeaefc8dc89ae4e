"""Vision towers, one file a kind: each states its tensors and its work, from which weights and estimates follow."""

from __future__ import annotations

from collections.abc import Mapping

from vtx.tools.model.tensors import Shapes
from vtx.tools.model.towers.axial import AxialTower
from vtx.tools.model.towers.convolutional import ConvolutionalTower
from vtx.tools.model.towers.encoder import EncoderTower
from vtx.tools.model.towers.joined.parts import JoinedTower
from vtx.tools.model.towers.naflex import NaflexTower
from vtx.tools.model.towers.native import NativeTower
from vtx.tools.model.towers.paired import PairedTower
from vtx.tools.model.towers.pixtral import PixtralTower
from vtx.tools.model.towers.tower import Tower
from vtx.tools.model.vision import VisionModel

TOWERS: Mapping[str, type[Tower]] = {
    "axial": AxialTower,
    "convolutional": ConvolutionalTower,
    "encoder": EncoderTower,
    "joined": JoinedTower,
    "naflex": NaflexTower,
    "native": NativeTower,
    "paired": PairedTower,
    "pixtral": PixtralTower,
}


def tower_of(model: VisionModel) -> Tower:
    return TOWERS[model.vision.kind](model)


def vision_shapes(model: VisionModel, out: int, *, last_attention: bool = False) -> Shapes:
    """Canonical names and shapes of the weights of tower and projector, before a decoder of `out` channels."""
    tower = tower_of(model)
    yield from tower.tensors(last_attention=last_attention)
    yield from tower.projector(out)
