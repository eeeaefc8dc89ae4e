"""What an export is asked for, checked as far as that needs no checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtx.exporter.bundling.predict import QUESTION_ROWS
from vtx.exporter.bundling.retain import Retain
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.data.items import Data
from vtx.exporter.weights.precision import FULL, Precisions
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import RequestError

DEMO = "demo"


@dataclass(frozen=True, slots=True)
class Aware:
    """The questions whose activations decide."""

    data: Data

    def check(self, precision: str) -> None:
        """Raise RequestError where no matrix of the decoder is quantised."""
        if precision in FULL:
            raise RequestError(
                f"--activation-aware changes what rounding to integers loses, and {precision} weights are not rounded "
                "to integers; add --precision int4 or int8, or leave it out"
            )

    def digest(self) -> str:
        """Changes with any item."""
        return hashlib.sha256("".join(item.digest() for item in self.data.items).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export. `ks` are the withdrawal depths to prebuild, the first one the default; empty: none.

    `dialects` are the operator sets to write the graphs in.
    "auto" stands for every depth that has a gate in the file `gates`, and the gates decide by default.
    `calibration` says how K was chosen where it was measured; it is kept in the record. `reductions` are words of
    methods that leave out vision rows, the first one the default; `retain` says how many rows its thresholds are to
    keep. `aware` names questions by whose activations the channels of quantised matrices are scaled.
    """

    model: str = DEMO
    ks: tuple[int, ...] | Literal["auto"] = ()
    precision: str = "fp16"
    max_context: int | None = None
    template: str | None = None
    gates: Path | None = None
    calibration: Mapping[str, Any] | None = None
    dialects: tuple[str, ...] = DIALECTS
    reductions: tuple[str, ...] = ()
    vision_precision: str | None = None
    head_precision: str | None = None
    kv_precision: str | None = None
    retain: Retain | None = None
    aware: Aware | None = None

    def __post_init__(self) -> None:
        precisions = self.precisions()
        if self.aware is not None:
            self.aware.check(precisions.decoder)
        if "ort" not in self.dialects or not set(self.dialects) <= set(DIALECTS):
            asked = ", ".join(self.dialects)
            raise RequestError(f"dialects {asked}: name ort, which vtx-run needs, and any of {', '.join(DIALECTS)}")
        if self.max_context is not None and self.max_context < 2:
            raise RequestError(f"--max-context is {self.max_context}; give at least 2")
        if self.ks == "auto" and self.gates is None:
            raise RequestError(
                "--k auto needs something to choose by; add --gates FILE (vtx-train-gate makes one) for a K per "
                "question or --calibration DATA for one K, or name K"
            )

    def precisions(self) -> Precisions:
        """What was asked for, filled up with the defaults."""
        return Precisions.choose(self.precision, self.vision_precision, self.head_precision, self.kv_precision)

    def measured_rows(self, config: ModelConfig) -> tuple[int, ...]:
        """Rows of each prompt whose activations are measured, roughly."""
        items = self.aware.data.items if self.aware else ()
        return tuple(config.vision_tokens * len(item.images) + QUESTION_ROWS for item in items)
