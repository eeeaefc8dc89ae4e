"""What engines of stages with the heads of published models contain, by the builder's own list of their layers.

TensorRT-RTX builds them without a GPU, in both dialects, so it stands in for TensorRT with `trt10`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.support.bundles import export_all
from tests.support.tiny import Tiny, make

from vtx.runtime.backends.tensorrt.engine import LOG
from vtx.runtime.bundle.bundle import Bundle
from vtx.tools.tensorrt.build import LARGEST_ENGINE, EngineJob, plan_engines
from vtx.tools.tensorrt.child import BuildRequest, build
from vtx.tools.tensorrt.profiles import input_shapes
from vtx.tools.tensorrt.targets import TARGETS, load_tensorrt

pytest.importorskip("tensorrt_rtx", reason='needs pip install "vtx-edge[rtx]"')
pytestmark = pytest.mark.slow
LAYERS = 2
KERNELS = 10 << 20  # bytes of engines of this size that are no weights
SHAPES = {
    "grouped-64": Tiny(layers=LAYERS, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816, context=2048),
    "all-128": Tiny(layers=LAYERS, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, context=2048),
}
LAUNCHES = 22  # of a layer, at most
LAYER = re.compile(r"^Name: (?P<name>.+?)_myl(?P<graph>\d+)_\d+, LayerType: (?P<kind>\w+),", re.MULTILINE)
NO_LAUNCHES = ("reshape", "cast", "copy", "signal", "wait")  # of sizes, on the host, and between streams
Bundles = Callable[[str, str], Bundle]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """A bundle of one stage by its shape and precision; each is made once."""
    folder = tmp_path_factory.mktemp("layers")
    checkpoint = cache(lambda shape: make(folder / shape, SHAPES[shape]))

    def bundle(shape: str, precision: str) -> Bundle:
        return export_all(checkpoint(shape), folder / f"{shape}-{precision}", (), precision, max_context=2048,
                      dialects=("ort", "trt", "trt10"))  # fmt: skip

    return cache(bundle)


def build_stage(
    bundle: Bundle,
    card: str,
    dialect: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    profiles: int | None = None,
) -> tuple[EngineJob, int, list[list[str]]]:
    """The job of the stage, the bytes of its engine, and the names of what each profile launches."""
    module, release = load_tensorrt(TARGETS[card])
    plan = plan_engines(bundle, TARGETS[card], release, module.__version__, dialect, profiles=profiles)
    (stage,) = bundle.manifest.dialects[dialect].stages
    job = next(job for job in plan.jobs if job.graph.name == stage)
    shapes = tuple(input_shapes(job.graph, profile) for profile in job.profiles)
    request = BuildRequest("tensorrt_rtx", bundle.path(stage), folder / "engine", TARGETS[card].capability, shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOG, "1")
        built = build(request, lambda *_: None)
    graphs = defaultdict[str, list[str]](list)
    for layer in LAYER.finditer(capfd.readouterr().err):
        if layer["kind"] not in NO_LAUNCHES:
            graphs[layer["graph"]].append(layer["name"])
    return job, built.bytes, list(graphs.values())


@pytest.mark.covering(2)
@pytest.mark.parametrize("card", ["sm86", "sm89", "sm120"])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_weights_are_fused_in_every_profile(
    shape: str, dialect: str, precision: str, card: str, bundles: Bundles, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    job, size, graphs = build_stage(bundles(shape, precision), card, dialect, tmp_path, capfd)
    assert len(graphs) == len(job.profiles) == (2 if precision == "int4" else 1)
    for names in graphs:
        assert sum("_mha_" in name for name in names) == LAYERS
        apart = [name for name in names if "CastMulCast" in name and "Fc" not in name and "Mean" not in name]
        assert not apart, "weights are dequantised by kernels of their own"
        assert len(names) <= LAUNCHES * LAYERS
    assert size < LARGEST_ENGINE * job.graph.weights + KERNELS
