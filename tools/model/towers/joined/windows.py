"""Windows of SAM's and EVA-02's blocks, which zeros fill beyond the last patches."""

from __future__ import annotations

from vtx.tools.model.vision import VisionConfig


def attention_side(v: VisionConfig, layer: int) -> int:
    """Side, in patches, of the squares within which a layer attends."""
    return v.grid if layer in v.full_blocks or v.window is None else v.window


def padded_patches(v: VisionConfig, layer: int = -1) -> int:
    """Patches of all squares of a layer, or of one of those with windows, if there are any."""
    side = attention_side(v, layer)
    return (-(-v.grid // side) * side) ** 2
