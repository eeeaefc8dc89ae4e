"""Pictures that need no resizing, so that every rival sees the same pixels, and their normalised values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, where preprocessor_config.json names none
STD = (0.26862954, 0.26130258, 0.27577711)


def write(path: Path, side: int, seed: int) -> None:
    """A `side` by `side` picture of coarse blocks under fine noise."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    blocks = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((side, side), 0)
    noise = rng.integers(-20, 21, (side, side, 3))
    Image.fromarray(np.clip(np.asarray(blocks) + noise, 0, 255).astype(np.uint8)).save(path)


def pixels(path: Path, checkpoint: Path) -> Any:
    """[1, 3, side, side] float32, as the checkpoint's processor makes them of a picture of the right size."""
    import numpy as np
    from PIL import Image

    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    mean, std = (
        np.array(settings.get(name, usual), np.float32) for name, usual in (("image_mean", MEAN), ("image_std", STD))
    )
    values = (np.asarray(Image.open(path).convert("RGB")) * (1 / 255)).astype(np.float32)
    return ((values - mean) / std).transpose(2, 0, 1)[None].copy()
