"""SmolVLM and Idefics3, with text among their tiles."""

from __future__ import annotations

from dataclasses import replace

from tests.support.tiny import Tiny

SMOLVLM = Tiny(family="smolvlm", vision="siglip", tokenizer="bytes", names="saved", context=512)
IDEFICS = replace(SMOLVLM, family="idefics3", kv_heads=4, tied=True, names="hub", shards=2)
