"""A vision tower: what is asked of each kind, and the answers of those that are made of equal blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise

from vtx.tools.model.tensors import Shapes, linear_tensors, norm_tensors
from vtx.tools.model.vision import VisionConfig, VisionModel


@dataclass(frozen=True, slots=True)
class Tower(ABC):
    """The tower of a model, with the projector behind it.

    Its work is in multiply-accumulates of one view, attention products included. Layers of several kinds count with
    their mean, and towers that are no layers count as one.
    """

    model: VisionModel

    @abstractmethod
    def tensors(self, *, last_attention: bool = False) -> Shapes:
        """Canonical names and shapes of the tower's weights, up to the last feature layer.

        `last_attention`: also what the attention of its last block takes.
        """

    def projector(self, out: int) -> Shapes:
        """Canonical names and shapes of the projector's weights, before a decoder of `out` channels."""
        model = self.model
        if model.projector_norm_eps is not None:
            yield from norm_tensors("projector.norm", model.feature_width, bias=not model.projector_rms)
        between = model.projector_widths or [model.between(out)] * (model.projector_layers - 1)
        for name, (into, width) in zip(
            model.projector_matrices, pairwise([model.feature_width, *between, out]), strict=True
        ):
            yield from linear_tensors(name, width, into, bias=model.projector_bias)

    @property
    def vision(self) -> VisionConfig:
        return self.model.vision

    @property
    def moments(self) -> int:
        """Pictures that a patch's kernel covers."""
        return 1

    @property
    def used(self) -> int:
        """The layers that are exported."""
        return max(self.model.feature_layers)

    def tokens(self, patches: int) -> int:
        """Hidden states of a layer."""
        return patches + self.vision.class_token

    def patch_macs(self, patches: int) -> int:
        return patches * self.vision.hidden * 3 * self.vision.patch**2

    def layer_macs(self, tokens: int) -> int:
        return block_macs(self.vision, tokens, tokens)

    def widest(self, patches: int) -> int:
        """Numbers that a layer holds: two residual vectors a token, and q, k, v or the MLP's vectors."""
        hidden = self.vision.hidden
        ffn = self.vision.ffn
        return self.tokens(patches) * (2 * hidden + max(4 * hidden, 2 * ffn))

    def apart(self, patches: int) -> int:
        """As `widest`, if nothing takes the memory of another: with q, k, v, two of them rotated, and the MLP's."""
        return self.tokens(patches) * (8 * self.vision.hidden + 2 * self.vision.ffn)


def block_macs(vision: VisionConfig, tokens: int, visible: int, matrices: int = 2) -> int:
    """The work of a block on `tokens` tokens that attend to `visible` ones; `matrices`: those of its MLP."""
    hidden = vision.hidden
    return tokens * (4 * hidden * hidden + matrices * hidden * vision.ffn) + 2 * tokens * visible * hidden
