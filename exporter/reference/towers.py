"""The towers of the reference, found by their kind, with the projector behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.reference.axial import AxialReference
from vtx.exporter.reference.convolutional import ConvolutionalReference
from vtx.exporter.reference.encoder import EncoderReference
from vtx.exporter.reference.feed_forward import activate
from vtx.exporter.reference.joined import JoinedTowers
from vtx.exporter.reference.native import NativeReference
from vtx.exporter.reference.parts import Read, TowerWeights
from vtx.exporter.reference.pixtral import PixtralReference
from vtx.tools.model.towers import vision_shapes
from vtx.tools.model.towers.encoder import POST_NORM, TOWER
from vtx.tools.model.towers.paired import BESIDE
from vtx.tools.model.vision import VisionConfig

See = Callable[[Tensor], list[Tensor]]  # views to their tokens [tokens, hidden], and the maps, which are alike


def make_tower(config: ModelConfig, read: Read) -> See:
    """Views [views, 3, height, width] to their tokens and the tower's maps for the decoder."""
    names = {name for name, _ in vision_shapes(config, config.text.hidden)}
    parts = TowerWeights(read, names, config.vision.eps)
    return _MAKE[config.vision.kind](config, parts)


def _axial(c: ModelConfig, parts: TowerWeights) -> See:
    tower = AxialReference(c.vision, parts)

    def see(pixels: Tensor) -> list[Tensor]:
        return [parts.linear(torch.cat([tower.states(image) for image in pixels]), "projector.linear_1")]

    return see


def _native(c: ModelConfig, parts: TowerWeights) -> See:
    tower = NativeReference(c, parts)

    def see(pixels: Tensor) -> list[Tensor]:
        return [*map(torch.cat, zip(*map(tower.tokens, pixels), strict=True))]

    return see


def _pixtral(c: ModelConfig, parts: TowerWeights) -> See:
    tower = PixtralReference(c, parts)
    return lambda pixels: [torch.cat([tower.tokens(image) for image in pixels])]


def _convolutional(c: ModelConfig, parts: TowerWeights) -> See:
    tower = ConvolutionalReference(c.vision, parts)
    return lambda pixels: [_projected(c, parts, tower.states(pixels))]


def _joined(c: ModelConfig, parts: TowerWeights) -> See:
    tower = JoinedTowers(c.vision, parts.read, activate)
    return lambda pixels: [_projected(c, parts, tower.states(pixels))]


def _encoder(c: ModelConfig, parts: TowerWeights) -> See:
    v = c.vision
    tower = EncoderReference(v, parts, TOWER, max(c.feature_layers))

    def see(pixels: Tensor) -> list[Tensor]:
        states, grid = tower.states(pixels)
        if v.post_norm:
            states[-1] = parts.norm(states[-1], POST_NORM)
        features = torch.cat([states[number][:, c.left_out :] for number in c.feature_layers], -1)
        if v.beside is not None:
            features = torch.cat((features, _beside(v.beside, parts, pixels)), -1)
        return [_projected(c, parts, _grouped(v, features, *grid))]

    return see


def _beside(v: VisionConfig, parts: TowerWeights, pixels: Tensor) -> Tensor:
    """The features of a second tower, which reads the pixels in its own way."""
    scale, shift = (torch.tensor(part)[:, None, None] for part in (v.pixel_scale, v.pixel_shift))
    states, _ = EncoderReference(v, parts, BESIDE, v.layers - 1).states(pixels * scale + shift)
    return states[-1]


def _grouped(v: VisionConfig, features: Tensor, high: int, wide: int) -> Tensor:
    """Features [views, patches, width], those of a square of patches joined or averaged."""
    views = len(features)
    if v.shuffle > 1:
        below = -high % v.shuffle
        right = -wide % v.shuffle
        grid = F.pad(features.reshape(views, high, wide, -1), (0, 0, 0, right, 0, below))
        down, across = (side // v.shuffle for side in grid.shape[1:3])
        blocks = grid.reshape(views, down, v.shuffle, across, v.shuffle, -1).transpose(2, 3)
        blocks = blocks.transpose(1, 2) if v.shuffle_by_columns else blocks
        features = blocks.reshape(views, down * across, -1)
    if v.pool > 1:
        pooled = F.avg_pool2d(features.transpose(1, 2).reshape(views, -1, high, wide), v.pool)
        features = pooled.flatten(2).transpose(1, 2)
    return features


def _projected(c: ModelConfig, parts: TowerWeights, features: Tensor) -> Tensor:
    if c.projector_norm_eps is not None:
        features = parts.norm(features, "projector.norm", c.projector_norm_eps)
    for number, matrix in enumerate(c.projector_matrices):
        features = activate(features, c.projector_activation) if number else features
        features = parts.linear(features, matrix)
    return features.flatten(0, 1)


_MAKE: Mapping[str, Callable[[ModelConfig, TowerWeights], See]] = {
    "axial": _axial,
    "convolutional": _convolutional,
    "encoder": _encoder,
    "joined": _joined,
    "naflex": _encoder,
    "native": _native,
    "paired": _encoder,
    "pixtral": _pixtral,
}
