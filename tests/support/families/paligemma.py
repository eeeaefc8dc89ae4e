"""PaliGemma: tiny checkpoints."""

from __future__ import annotations

from dataclasses import replace

from tests.support.tiny import Tiny

PALIGEMMA = Tiny(
    family="paligemma", text="gemma", vision="siglip", vision_head=False, tied=True, kv_heads=1, select="full",
    feature_layer=-1, head_dim=24,
)  # fmt: skip
PALIGEMMA2 = replace(
    PALIGEMMA, text="gemma2", kv_heads=2, sliding_window=4096, query_scale=20, softcap=5.0, attention_softcap=1.5
)
