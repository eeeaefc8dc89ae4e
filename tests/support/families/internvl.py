"""InternVL in Hugging Face's layout."""

from __future__ import annotations

from tests.support.tiny import Tiny

INTERNVL = Tiny(
    family="internvl", vision="internvl", text="qwen2", tokenizer="bytes", names="saved", feature_layer=-1, context=512,
    image=112,
)  # fmt: skip
