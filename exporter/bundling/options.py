"""The options of an export, checked as far as possible without the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.runtime.bundle.spec.manifest import BundleRelease
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.bundle.spec.stored import Precisions
from vtx.runtime.errors import RequestError
from vtx.runtime.precision import PRECISIONS
from vtx.tools.data.choice import RecordedChoice
from vtx.tools.data.items import Data, image_tokens
from vtx.tools.fit.retain import Retain

DEMO = "demo"
QUESTION_TOKENS = 64  # of the golden prompt, without the image
PRECISION = "fp16"  # unless another is named


@dataclass(frozen=True, slots=True)
class MeasuredArithmetic:
    """Questions (None: texts and scenes) on which a bundle is held to its checkpoint.

    `always`: also for an engine that is not the default, and however long it takes. `memory`: bytes at most.
    """

    data: Data | None = None
    always: bool = False
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The settings of an export. `ks` are the withdrawal depths to prebuild, the first one the default; empty: none.

    `precision`: None for `PRECISION`, or that of a quantised checkpoint.

    `dialects` are the operator sets to write the graphs in. "auto" means every depth that has a gate in the file
    `gates`, and the gates decide by default. `calibration` records how K was chosen if it was measured; it must keep
    90% of the answers, unless `allow_changed_answers` is set. `reductions` are the specs of methods that drop image
    tokens, the first one the default; `retain` is the number of tokens that its thresholds are to keep. `aware` holds
    the questions by whose activations the channels of quantised matrices are scaled. `text_tower` is the CLIP whose
    text tower the bundle is to hold. `tower` is the vision tower of a checkpoint that only names one, and
    `allow_pickle` allows weights that are pickles. `int4_block`, `int8_block`: the most weights that share a scale;
    None: the default, in int8 a row. `arithmetic`: the questions with which narrower arithmetic is measured. `release`
    numbers a signed bundle. `cameras` name the pictures of a model that outputs actions. `downsample` is the number of
    patches in an image token, of a model that leaves the choice: `Family.downsampling`. `stage_layers`: the most layers
    of a graph, None for as many as K and the reductions leave; builders of engines need memory for the largest graph.
    `bits`: those of a weight of the decoder and the head in the mean, for which matrices of an int4 decoder are int8.
    """

    model: str = DEMO
    ks: tuple[int, ...] | Literal["auto"] = ()
    precision: str | None = None
    max_context: int | None = None
    template: str | None = None
    gates: Path | None = None
    calibration: RecordedChoice | None = None
    dialects: tuple[str, ...] = DIALECTS
    reductions: tuple[str, ...] = ()
    vision_precision: str | None = None
    head_precision: str | None = None
    kv_precision: str | None = None
    retain: Retain | None = None
    aware: Data | None = None
    text_tower: str | None = None
    tower: str | None = None
    allow_pickle: bool = False
    int4_block: int | None = None
    int8_block: int | None = None
    allow_changed_answers: bool = False
    arithmetic: MeasuredArithmetic | None = None
    release: BundleRelease | None = None
    cameras: tuple[str, ...] = ()
    downsample: str | None = None
    stage_layers: int | None = None
    bits: float | None = None

    def __post_init__(self) -> None:
        precisions = self.precisions()
        if self.calibration is not None:
            if self.ks != (self.calibration.k,):
                raise RequestError(f"K is {self.ks}, but the calibration chose {self.calibration.k}; give one of them")
            self.calibration.check(allowed=self.allow_changed_answers)
        if self.aware is not None and PRECISIONS[precisions.decoder].bits is None:
            raise RequestError(
                f"--activation-aware lowers the error of integer weights, and {precisions.decoder} weights are not "
                "rounded; add --precision int4 or int8, or leave it out"
            )
        if self.bits is not None and precisions.decoder != "int4":
            raise RequestError(
                f"--bits {self.bits:g} gives some matrices of an int4 decoder more bits, and this one is "
                f"{precisions.decoder}; add --precision int4, or leave it out"
            )
        if "ort" not in self.dialects or not set(self.dialects) <= set(DIALECTS):
            names = ", ".join(self.dialects)
            raise RequestError(f"--dialect is {names}; name ort, which vtx-run needs, and any of {', '.join(DIALECTS)}")
        if self.stage_layers is not None and self.stage_layers < 1:
            raise RequestError(f"--stage-layers is {self.stage_layers}; it must be at least 1")
        if self.max_context is not None and self.max_context < 2:
            raise RequestError(f"--max-context is {self.max_context}; it must be at least 2")
        if self.ks == "auto" and self.gates is None:
            raise RequestError(
                "--k auto needs gates or a calibration; add --gates FILE (from vtx-train-gate) for a K per question, "
                "--calibration DATA for one K, or name K"
            )

    @property
    def blocks(self) -> dict[str, int]:
        """The most weights that share a scale, by precision, where they are named."""
        blocks = {"int4": self.int4_block, "int8": self.int8_block}
        return {precision: block for precision, block in blocks.items() if block is not None}

    def precisions(self, own: Mapping[str, str] | None = None) -> Precisions:
        """The precisions of the parts; `own`: those of a quantised checkpoint, of parts for which none is named."""
        parts = {"decoder": self.precision, "vision": self.vision_precision, "head": self.head_precision}
        own = own if self.precision is None else None
        unnamed = [part for part, precision in parts.items() if own and precision is None]
        parts |= {part: own.get(part, PRECISION) for part in unnamed if own}
        decoder = parts.pop("decoder") or PRECISION
        precisions = Precisions.choose(decoder, **parts, kv=self.kv_precision, blocks=self.blocks)
        return replace(precisions, own=tuple(unnamed))

    def measured_tokens(self, config: ModelConfig) -> tuple[int, ...]:
        """Approximate number of tokens of each prompt whose activations are measured."""
        items = self.aware.items if self.aware else ()
        return tuple(image_tokens(config.layout, item) + QUESTION_TOKENS for item in items)
