"""PaliGemma: tiny checkpoints."""

from __future__ import annotations

from tests.support.tiny import Tiny

PALIGEMMA = Tiny(
    family="paligemma", text="gemma", vision="siglip", vision_head=False, tied=True, kv_heads=1, select="full",
    feature_layer=-1, head_dim=24,
)  # fmt: skip
