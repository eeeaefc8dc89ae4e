"""LLaVA-NeXT in Hugging Face's layout, whose images are tiles."""

from __future__ import annotations

from tests.support.tiny import Tiny

LLAVA_NEXT = Tiny(family="llava_next", context=512)
GRANITE = Tiny(
    family="llava_next", context=512, text="granite", vision="siglip", feature_layer=(-4, -2, -1), select="full",
    tied=True, tokenizer="bytes",
)  # fmt: skip
