"""Engines of stages with the heads of published models, and what they contain by the builder's own list of layers.

TensorRT-RTX builds them without a GPU, in both dialects, so it stands in for TensorRT with `trt10`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TextIO

from tests.support.bundles import export
from tests.support.tiny import Tiny, make
from vtx.runtime.backends.tensorrt.engine import LOG
from vtx.runtime.bundle.bundle import Bundle
from vtx.tools.tensorrt.build import EngineJob, plan_engines
from vtx.tools.tensorrt.child import BuildRequest, build
from vtx.tools.tensorrt.profiles import input_shapes
from vtx.tools.tensorrt.targets import TARGETS, load_tensorrt

SHAPES = {  # of the results
    "grouped": Tiny(hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816, context=2048),
    "all": Tiny(hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, context=2048),
}
WIDER = {  # where kernels, which all widths have, are a smaller part of an engine
    "grouped, hidden 2048": Tiny(hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=5632, context=2048),
    "all, hidden 2048": Tiny(hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=5632, context=2048),
}
PRECISIONS = ("fp16", "int8", "int4")
DIALECTS = ("trt", "trt10")
CARDS = ("sm86", "sm89", "sm120")
LAYER = re.compile(r"^Name: (?P<name>.+?)_myl(?P<graph>\d+)_\d+, LayerType: (?P<kind>\w+),", re.MULTILINE)
STREAM = re.compile(r"\bStreamId: (\d+)")
WEIGHTS = re.compile(r"^Total Weights Memory: (\d+) bytes", re.MULTILINE)
NO_LAUNCHES = ("reshape", "cast", "copy", "signal", "wait")  # of sizes, on the host, and between streams
Bundles = Callable[[str, str, int], Bundle]


@dataclass(frozen=True, slots=True)
class StageEngine:
    """The engine of a bundle's one stage: its bytes, those of the weights in it, and by profile what it launches.

    `streams`: those that layers run on.
    """

    job: EngineJob
    size: int
    weights: int
    launches: tuple[tuple[str, ...], ...]
    streams: frozenset[str]

    @property
    def attention(self) -> list[int]:
        """Fused kernels of attention in each profile."""
        return [sum("_mha_" in name for name in names) for names in self.launches]

    @property
    def casts(self) -> list[int]:
        """Kernels in each profile that dequantise weights beside the product that reads them."""
        return [
            sum("CastMulCast" in name and "Fc" not in name and "Mean" not in name for name in names)
            for names in self.launches
        ]

    @property
    def copies(self) -> float:
        """Bytes of weights in the engine by those of the graph."""
        return self.weights / self.job.graph.weights


def bundles_of(folder: Path) -> Bundles:
    """A function that makes a bundle of one stage by its shape, precision and layers, each once."""

    @cache
    def checkpoint(shape: str, layers: int) -> Path:
        return make(folder / f"{shape}-{layers}", replace((SHAPES | WIDER)[shape], layers=layers))

    def bundle(shape: str, precision: str, layers: int) -> Bundle:
        return export(checkpoint(shape, layers), folder / f"{shape}-{layers}-{precision}", (), precision,
                      max_context=2048, dialects=("ort", *DIALECTS))  # fmt: skip

    return cache(bundle)


def build_stage(bundle: Bundle, card: str, dialect: str, folder: Path, batch: int | None = None) -> StageEngine:
    """Build the engine of the stage; `batch` as for vtx-build."""
    module, release = load_tensorrt(TARGETS[card])
    plan = plan_engines(bundle, TARGETS[card], release, module.__version__, dialect, batch=batch)
    (stage,) = bundle.manifest.dialects[dialect].stages
    job = next(job for job in plan.jobs if job.graph.name == stage)
    return build_job(job, bundle.path(stage), card, folder)


def build_job(job: EngineJob, graph: Path, card: str, folder: Path) -> StageEngine:
    """Build the engine of `graph` with the profiles of a job."""
    shapes = tuple(input_shapes(job.graph, profile) for profile in job.profiles)
    request = BuildRequest("tensorrt_rtx", graph, folder / "engine", TARGETS[card].capability, shapes)
    with _logged() as file:
        built = build(request, lambda *_: None)
        file.seek(0)
        log = file.read()
    launches = defaultdict[str, list[str]](list)
    for layer in LAYER.finditer(log):
        if layer["kind"] not in NO_LAUNCHES:
            launches[layer["graph"]].append(layer["name"])
    weights = sum(map(int, WEIGHTS.findall(log)))
    return StageEngine(job, built.bytes, weights, tuple(map(tuple, launches.values())), frozenset(STREAM.findall(log)))


@contextmanager
def _logged() -> Iterator[TextIO]:
    """The builder's whole log: its processes write to this one's standard error, which is a file meanwhile."""
    before = os.environ.get(LOG)
    standard_error = os.dup(2)
    with tempfile.TemporaryFile("w+") as log:
        os.environ[LOG] = "1"
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            os.environ.pop(LOG)
            if before is not None:
                os.environ[LOG] = before
