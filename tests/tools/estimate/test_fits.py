"""What fits is what the plan's peak memory says, from no withdrawal to the earliest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtx.runtime.backends.engines import ENGINES, TENSORRT_COSTS
from vtx.runtime.host.device import Device, Jetson
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.host.profiles import Profile, load_profile, profile_names
from vtx.tools.estimate.fits import EXPORTED, SHOWN, WORK, Fit, fits_here, what_fits
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import head_weights, precisions_by_name, precisions_of, stored_bytes, vision_weights
from vtx.tools.tensorrt.memory import build_memory, buildable_layers
from vtx.tools.tensorrt.releases import RTX, TENSORRT, parse_release
from vtx.tools.tensorrt.support import gpu_cost

ORIN = load_profile("agx-orin-64")
LLAVAS = ("llava-1.5-7b", "llava-1.5-13b")
JETSONS = [name for name in profile_names() if load_profile(name).kind == "jetson"]
PAGE = (Path(__file__).parents[3] / "docs/how-to/jetson.md").read_text(encoding="utf-8")


def short_name(profile: Profile) -> str:
    return profile.name.removeprefix("NVIDIA Jetson ")


def peak(model: str, precision: str, k: int | None) -> int:
    size = KNOWN[model]
    assert size.vision is not None
    work = Workload(WORK[0], size.vision.image_tokens, WORK[1])
    plan = make_plan(size, work, PlannedMethods([k]), precisions_by_name(size, [precision]), ORIN)
    return plan.depths[0].precisions[precision].peak_bytes


@pytest.mark.slow
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
@pytest.mark.parametrize("device", JETSONS)
def test_the_table_in_the_jetson_page_is_what_the_plan_says(device: str) -> None:
    profile = load_profile(device)
    fits = what_fits(profile, models=LLAVAS, engine=TENSORRT_COSTS[TENSORRT])
    cells = [fit for name in LLAVAS for fit in fits[name]]
    row = " | ".join([short_name(profile), f"{profile.usable_bytes / 1e9:.1f} GB", *map(str, cells)])
    assert f"| {row} |" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("device", JETSONS)
def test_every_engine_of_a_model_that_the_page_says_fits_can_be_built_there(device: str) -> None:
    """Stages of one layer at least, head, embedding and tower, each held as TensorRT may hold it."""
    profile = load_profile(device)
    cost = TENSORRT_COSTS[TENSORRT]
    for model, fits in what_fits(profile, models=LLAVAS, engine=cost).items():
        size = KNOWN[model]
        assert size.vision is not None
        for fit in fits:
            if fit.fits:
                parts = precisions_of(size, fit.precision)
                graphs = [vision_weights(size.vision), head_weights(size, parts)]
                largest = max(stored_bytes(graph, parts, int8=cost.int8) for graph in graphs)
                embedding = 2 * size.decoder.vocab * size.decoder.hidden
                assert build_memory(max(largest, embedding), 1) <= profile.usable_bytes
                assert buildable_layers(size, parts, profile.usable_bytes, cost.int8) >= 1


def test_the_jetpacks_of_the_page_are_those_of_the_devices_with_their_dialects() -> None:
    starts = ("| | JetPack", "| TensorRT |", "| dialect of the graphs |")
    rows = (next(line for line in PAGE.splitlines() if line.startswith(start)) for start in starts)
    columns = list(zip(*(row.strip("|").split("|")[1:] for row in rows), strict=True))
    listed = [
        (re.findall(r"[\d.]+", names), release.strip(), dialect.strip(" `")) for names, release, dialect in columns
    ]
    packs = {pack for name in JETSONS for pack in load_profile(name).jetpack if pack.version >= "6"}
    known = {(pack.version, pack.tensorrt, parse_release(TENSORRT, pack.tensorrt).dialect) for pack in packs}
    assert known <= {(version, *others) for versions, *others in listed for version in versions}
    assert all(known & {(version, *others) for version in versions} for versions, *others in listed)


@pytest.mark.parametrize("device", ["orin-nano-8", "orin-nx-16"])
def test_the_page_names_the_most_layers_that_a_device_builds_and_its_export_has_no_more(device: str) -> None:
    profile = load_profile(device)
    llava = KNOWN["llava-1.5-7b"]
    most = buildable_layers(llava, precisions_of(llava, "int4"), profile.usable_bytes)
    assert re.search(rf"of llava-1.5-7b in int4 [^.]*\b{most} on an {short_name(profile)}", PAGE)
    (layers,) = re.findall(r"--precision int4 --stage-layers (\d+)", PAGE)
    assert int(layers) <= most


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


@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("capability", "flavour"), [((8, 7), TENSORRT), ((11, 0), TENSORRT), ((9, 0), TENSORRT), ((8, 9), RTX)]
)
def test_a_machine_is_counted_with_the_tensorrt_that_is_for_its_gpu(capability: tuple[int, int], flavour: str) -> None:
    card = Device(None, (Gpu("X", capability, 18 << 30, (13, 0)),), None)
    assert gpu_cost(card) is TENSORRT_COSTS[flavour]
    (shared,) = fits_here(card, None, gpu_cost(card))
    int8 = shared.models["llava-1.5-13b"][SHOWN.index("int8")]
    assert int8.fits == (flavour == RTX)


def test_a_jetson_without_a_driver_is_counted_with_its_tensorrt() -> None:
    orin = Device(Jetson("Orin", "p3701-0004", "36.4", "6.2", "10.3.0.30"), (), "agx-orin-32")
    assert gpu_cost(orin) is TENSORRT_COSTS[TENSORRT]
