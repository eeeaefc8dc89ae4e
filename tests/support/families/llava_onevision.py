"""LLaVA-OneVision in Hugging Face's layout."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny

ONEVISION = Tiny(
    family="llava_onevision", vision="siglip", text="qwen2", tokenizer="bytes", feature_layer=-1, select="full",
    vision_head=False, context=512,
)  # fmt: skip


def onevision_of_another_scale(source: Path, target: Path) -> Path:
    """A copy of the checkpoint whose pixel values go from -1 to 1 by another road: value / 127.5 - 1."""
    shutil.copytree(source, target)
    file = target / "preprocessor_config.json"
    changed = {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 0.9, 0.8], "image_std": [1.0, 1.0, 1.0]}
    write_json(file, read_json(file) | changed)
    return target
