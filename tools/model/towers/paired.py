"""DINOv2 with registers, and a second tower beside it over the same patches (OpenVLA): their features are joined."""

from __future__ import annotations

from vtx.tools.model.tensors import Shapes
from vtx.tools.model.towers.encoder import TOWER, embedding_tensors, encoder_tensors, post_norm_tensors
from vtx.tools.model.towers.tower import Tower, block_macs
from vtx.tools.model.vision import VisionConfig

BESIDE = "vision.beside"  # the first part of the names of the second tower's weights


class PairedTower(Tower):
    """Layers are the first tower's, each with its share of the second's."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        yield from embedding_tensors(self.vision, TOWER)
        yield from encoder_tensors(self.vision, self.used, last_attention)
        yield from post_norm_tensors(self.vision)
        yield from embedding_tensors(self._second, BESIDE)
        yield from encoder_tensors(self._second, self._second_used, tower=BESIDE)

    @property
    def _second(self) -> VisionConfig:
        assert self.vision.beside is not None, "a pair has two towers"
        return self.vision.beside

    @property
    def _second_used(self) -> int:
        return self._second.layers - 1

    def tokens(self, patches: int) -> int:
        return patches + self.vision.class_token + (self.vision.registers or 0)

    def patch_macs(self, patches: int) -> int:
        return patches * (self.vision.hidden + self._second.hidden) * 3 * self.vision.patch**2

    def layer_macs(self, tokens: int) -> int:
        states = self._second.states
        share = self._second_used * block_macs(self._second, states, states) // self.used
        return block_macs(self.vision, tokens, tokens) + share
