"""One view of each image, and the same number of tokens for every size: LLaVA-1.5."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layout import Layout, image_layout
from vtx.runtime.vision.plan import ImagePlan, View


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

    def plan(self, width: int, height: int) -> ImagePlan:
        return ImagePlan((View(self.tokens),))
