"""What fits is what the plan's peak memory says, from no withdrawal to the earliest."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.host.device import Device, Jetson
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.host.profiles import load_profile, profile_names
from vtx.tools.estimate.fits import EXPORTED, SHOWN, WORK, Fit, fits_here, what_fits
from vtx.tools.estimate.plan import Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import precisions_by_name
from vtx.tools.tensorrt.releases import TENSORRT, parse_release
from vtx.tools.tensorrt.support import gpu_cost

ORIN = load_profile("agx-orin-64")
LLAVAS = ("llava-1.5-7b", "llava-1.5-13b")


def peak(model: str, precision: str, k: int | None) -> int:
    size = KNOWN[model]
    assert size.vision is not None
    work = Workload(WORK[0], size.vision.image_tokens, WORK[1])
    plan = make_plan(size, work, [k], precisions_by_name(size, [precision]), ORIN)
    return plan.depths[0].precisions[precision].peak_bytes


def test_seven_billion_weights_fit_in_every_precision_on_the_largest_orin_and_only_in_int4_on_the_smallest() -> None:
    small, large = LLAVAS
    assert [str(fit) for fit in what_fits(ORIN, models=LLAVAS)[small]] == ["yes"] * len(SHOWN)
    assert [fit.fits for fit in what_fits(load_profile("orin-nano-8"), models=LLAVAS)[small]] == [False, False, True]
    assert not any(fit.fits for fit in what_fits(load_profile("orin-nano-4"), models=LLAVAS)[large])


def test_where_the_whole_cache_does_not_fit_the_deepest_k_that_does_is_named() -> None:
    none, deepest, one_more = (peak("llava-next-7b", "int4", k) for k in (None, 20, 21))
    assert deepest < one_more < none
    fit = what_fits(ORIN, deepest, ["int4"], ["llava-next-7b"])["llava-next-7b"][0]
    assert fit == Fit("llava-next-7b", "int4", True, 20)
    assert str(fit) == "K up to 20"


def test_one_byte_decides() -> None:
    whole = peak("vila-7b", "int4", None)
    assert str(what_fits(ORIN, whole, ["int4"], ["vila-7b"])["vila-7b"][0]) == "yes"
    assert str(what_fits(ORIN, whole - 1, ["int4"], ["vila-7b"])["vila-7b"][0]).startswith("K up to")
    assert str(what_fits(ORIN, peak("vila-7b", "int4", 2) - 1, ["int4"], ["vila-7b"])["vila-7b"][0]) == "no"


@pytest.mark.slow
def test_the_table_in_the_jetson_page_is_what_the_plan_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "jetson.md").read_text(encoding="utf-8")
    for name in profile_names():
        profile = load_profile(name)
        releases = {
            j.version[0]: parse_release(TENSORRT, j.tensorrt).dialect for j in profile.jetpack if j.version > "6"
        }
        for dialect in releases.values():  # alike with each JetPack
            fits = what_fits(profile, models=LLAVAS, engine=ENGINES["tensorrt"].costs[dialect])
            cells = [fit for name in LLAVAS for fit in fits[name]]
            device = profile.name.removeprefix("NVIDIA Jetson ")
            row = " | ".join([device, f"{profile.usable_bytes / 1e9:.1f} GB", *map(str, cells)])
            assert f"| {row} |" in page


def test_only_models_that_export_are_listed() -> None:
    assert tuple(what_fits(ORIN, precisions=["int4"])) == EXPORTED
    for name in EXPORTED:  # one view of one tower, as vtx-export takes it
        vision = KNOWN[name].vision
        assert vision is not None
        assert (vision.views, vision.towers, vision.image_tokens) == (1, 1, vision.patches)


def test_a_cpu_counts_floats_as_its_engine_keeps_them() -> None:
    cpu, free = load_profile("cpu"), 20_000_000_000  # 14 GB of fp16 weights, which onnxruntime expands to 28
    assert not what_fits(cpu, free, ["fp16"], ["llava-1.5-7b"])["llava-1.5-7b"][0].fits
    assert what_fits(cpu, free, ["fp16"], ["llava-1.5-7b"], engine=ENGINES["openvino"].costs["plain"])["llava-1.5-7b"][
        0
    ].fits


def test_a_machine_is_told_of_its_gpu_and_of_its_cpu() -> None:
    card, unknown = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 << 30, (13, 0)), Gpu("X", (8, 9), 10 << 30, (13, 0))
    gpu, cpu = fits_here(Device(None, (card,), "rtx-4090"), "openvino")
    assert (gpu.device, gpu.usable) == (card.name, load_profile("rtx-4090").usable_bytes)
    assert cpu.device == "this CPU with --device openvino"
    (gpu,) = fits_here(Device(None, (unknown,), None), None)
    assert (gpu.device, gpu.usable) == ("X", int(0.9 * (10 << 30)))
    orin = Jetson("Orin", "p3767-0005", "36.4", "6.2", "10.3")
    (shared,) = fits_here(Device(orin, (), "orin-nano-8"), "cpu")
    assert shared.device == "NVIDIA Jetson Orin Nano 8GB"
    assert fits_here(Device(None, (), None), None) == []


@pytest.mark.slow
def test_a_jetson_is_counted_with_the_graphs_of_its_tensorrt() -> None:
    """In half precision from the oldest release on."""
    for release, dialect in (("10.3.0.30", "trt10"), ("10.16.2", "trt"), ("8.5.2", "trt"), (None, "trt")):
        orin = Device(Jetson("Orin", "p3701-0004", "36.4", "6.2", release), (), "agx-orin-32")
        assert gpu_cost(orin) == ENGINES["tensorrt"].costs[dialect]
        (shared,) = fits_here(orin, None, gpu_cost(orin))
        assert str(shared.models["llava-1.5-13b"][0]) == "yes"
