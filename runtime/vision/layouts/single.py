"""One view of each image, and the same number of tokens for every size: LLaVA-1.5."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layout import Layout, image_layout
from vtx.runtime.vision.preprocess import preprocess


@image_layout("single")
@dataclass(frozen=True, slots=True)
class Single(Layout):
    """`tokens` an image."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise BundleError(
                f"layout 'single' has {self.tokens} tokens, at least 1 is needed; export the bundle again"
            )

    def check(self, tower: TowerSpec) -> None:
        if self.tokens != tower.tokens:
            raise BundleError(
                f"vtx.json: the image layout says {self.tokens} tokens an image, the tower gives {tower.tokens}; "
                "export the bundle again"
            )

    @property
    def max_tokens(self) -> int:
        return self.tokens

    def count(self, width: int, height: int) -> int:
        return self.tokens

    def views(self, image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
        return preprocess(image, settings)[None]
