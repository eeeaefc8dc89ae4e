"""The page about Jetsons states what plans state: models that fit, layers that can be built, releases of JetPack."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from vtx.runtime.backends.engines import TENSORRT_COSTS
from vtx.runtime.host.profiles import Profile, load_profile, profile_names
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import head_weights, precisions_by_name, precisions_of, stored_bytes, vision_weights
from vtx.tools.tensorrt.memory import build_memory, buildable_layers
from vtx.tools.tensorrt.releases import TENSORRT, parse_release

PRECISION_COLUMNS = ("fp16", "int8", "int4")
TEXT = 64  # tokens in addition to one image
ANSWER = 256
LLAVAS = ("llava-1.5-7b", "llava-1.5-13b")
JETSONS = [name for name in profile_names() if load_profile(name).kind == "jetson"]
PAGE = (Path(__file__).parents[3] / "docs/how-to/jetson.md").read_text(encoding="utf-8")


def short_name(profile: Profile) -> str:
    return profile.name.removeprefix("NVIDIA Jetson ")


def fit(profile: Profile, model: str, precision: str) -> str:
    """A cell of the page's table: yes, no, or the latest K at which the model fits."""
    size = KNOWN[model]
    assert size.vision is not None
    ks = (None, *range(size.decoder.layers, 1, -1))
    work = Workload(TEXT, size.vision.image_tokens, ANSWER)
    cost = TENSORRT_COSTS[TENSORRT]
    parts = precisions_by_name(size, [precision])
    plan = make_plan(size, work, PlannedMethods(ks), parts, profile, engine=cost)
    fitting = [depth.k for depth in plan.depths if depth.precisions[precision].peak_bytes <= profile.usable_bytes]
    if not fitting:
        return "no"
    return f"K up to {fitting[0]}" if fitting[0] else "yes"


@pytest.mark.slow
@pytest.mark.parametrize("device", JETSONS)
def test_the_table_in_the_jetson_page_is_what_the_plan_says(device: str) -> None:
    profile = load_profile(device)
    cells = [fit(profile, model, precision) for model in LLAVAS for precision in PRECISION_COLUMNS]
    row = " | ".join([short_name(profile), f"{profile.usable_bytes / 1e9:.1f} GB", *cells])
    assert f"| {row} |" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("device", JETSONS)
def test_every_engine_of_a_model_that_the_page_says_fits_can_be_built_there(device: str) -> None:
    """Stages of one layer at least, head, embedding and tower, each held as TensorRT may hold it."""
    profile = load_profile(device)
    cost = TENSORRT_COSTS[TENSORRT]
    for model, precision in product(LLAVAS, PRECISION_COLUMNS):
        size = KNOWN[model]
        assert size.vision is not None
        if fit(profile, model, precision) != "no":
            parts = precisions_of(size, precision)
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
