"""LSM, local spatial merging: windows of like patches become one token in the tower (MustDrop Eq. 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from vtx.runtime.bundle.spec.names import SIMILARITY, TAU
from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.options import cosine
from vtx.runtime.vision.tokens import Ids, ImageTokens


@reduction("lsm")
@dataclass(frozen=True, slots=True)
class Lsm(Reduction, Entry):
    """Non-overlapping 3x3 windows whose mean pairwise cosine is at least `tau` merge into their mean.

    A merged token has the index of its window's first patch. With order=merged-first merged tokens precede all others,
    the most similar window first, as in the code that came with the paper; of equal ones the earlier.
    """

    tau: float = cosine(0.8)
    order: Literal["raster", "merged-first"] = "raster"

    requires: ClassVar[dict[str, Any]] = {"merging": {}}

    def entry(self) -> Entry | None:
        return self

    def vision_inputs(self) -> Mapping[str, float]:
        return {TAU: self.tau}

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        if self.order == "raster":
            return None
        patches = image.patches
        rank = np.where(patches.merged, -patches.signals[SIMILARITY], np.inf)
        rank[patches.indices < 0] = -np.inf  # the class token stays first
        return np.argsort(rank, kind="stable").astype(np.int64)
