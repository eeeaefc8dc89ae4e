"""libvtx on TensorRT, over a stand-in that is compiled with TensorRT's own headers and watches every call: answers.

`make cpp-tensorrt TENSORRT=DIRECTORIES` builds plug-ins and stand-ins for the releases whose headers are given and runs
this; elsewhere it is skipped in one line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import export, export_all, export_with, write_gate
from tests.support.clip import make_clip
from tests.support.cpp import run
from tests.support.cpp_tensorrt import (
    BUILT,
    DUAL,
    RELEASES,
    Machine,
    ask,
    build,
    everything_given_back,
    needs_releases,
    version_of,
)
from tests.support.engines import on_standin, open_model, shorten
from tests.support.exported import THREADS
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.minicpm import MINICPM
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25, QWEN35
from tests.support.fixtures import Checkpoints, References
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import graphs
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.report.golden import logits_limit
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.files import read_index, read_tensors
from vtx.runtime.report.traces.record import write_traces

TOWER = "cdpruner:keep=20,text=tower"
FRAMES = int(os.environ.get("VTX_TEST_FRAMES", "30"))
CONTEXTS = ("cuCtxGetCurrent", "cuCtxSetCurrent")
ALLOCATIONS = ("cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags")
NATIVE = ("fastv:k=2,ratio=0.5", "cdpruner:keep=6", "dart:keep=8,k=3,pivots=2,text_pivots=2")

pytestmark = needs_releases


@pytest.fixture(scope="module")
def traces(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Python does with the bundle, on onnxruntime."""
    folder = tmp_path_factory.mktemp("traces") / "python"
    write_traces(load(engines, device="cpu", threads=THREADS), folder)
    return folder


def meets(bundle: Path, traces: Path, folder: Path, device: str = "tensorrt") -> int:
    """The number of questions compared, and one; fails with what differs."""
    done = run("traces", bundle, traces, folder, device)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    checks = list(compare_traces(traces, folder, logits_limit(Bundle.open(bundle).manifest, "f32")))
    assert [f"{check.name}: {check.note}" for check in checks if not check.passed] == []
    return len(checks)


def on_python(patch: pytest.MonkeyPatch, bundle: Path, release: str) -> Model:
    """The bundle on the stand-in of Python's backend for the same release and card."""
    major, minor = map(int, RELEASES[release][1].split("."))
    on_standin(patch, Gpu("Stand-in", (major, minor), 1 << 35, (13, 0)), version_of(release))
    return open_model(bundle)


def python_traces(patch: pytest.MonkeyPatch, bundle: Path, release: str, folder: Path) -> None:
    write_traces(on_python(patch, bundle, release), folder)


def exported_for(
    release: str, checkpoint: Path, folder: Path, ks: tuple[int, ...] = (2, 3, 5), reductions: tuple[str, ...] = ()
) -> Path:
    """A bundle with engines; its traces on onnxruntime and on Python's TensorRT are `ort` and `python` beside it."""
    dialects = tuple({"ort", RELEASES[release][2]})
    bundle = export(checkpoint, folder / "bundle", ks, dialects=dialects, reductions=reductions).folder
    build(bundle, release)
    write_traces(load(bundle, device="cpu", threads=THREADS), folder / "ort")
    with pytest.MonkeyPatch.context() as patch:
        python_traces(patch, bundle, release, folder / "python")
    return bundle


def run_applications(bundle: Path, report: Callable[[], dict[str, int]]) -> None:
    """Two questions about each frame, and a fork of the last; all but the first frame allocate and record nothing.

    And a conversation that goes on where it had too little memory.
    """
    made = list[list[int]]()
    for frames in (1, 4):
        done = run("frames", bundle, "tensorrt", str(frames))
        assert done.returncode == 0, done.stderr.decode()
        assert everything_given_back(report())
        made.append([report().get(name, 0) for name in ALLOCATIONS])
    assert made[0] == made[1]
    for fault in ("answer", "prompt"):
        done = run("faults", bundle, "tensorrt", fault)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        assert everything_given_back(report())


@pytest.mark.parametrize("release", BUILT)
def test_every_release_meets_the_traces(
    release: str, engines: Path, traces: Path, machine: Machine, tmp_path: Path
) -> None:
    report = machine(release)
    assert meets(engines, traces, tmp_path / "cpp") > 60
    assert everything_given_back(report())
    assert report().get("cuGraphLaunch", 0) > 0


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("tiny", [QWEN2, QWEN25, QWEN3], ids=lambda tiny: tiny.family)
def test_images_at_their_own_resolution_meet_the_traces_of_both_python_backends(
    tiny: Tiny, release: str, tiny_checkpoint: Checkpoints, machine: Machine, tmp_path: Path
) -> None:
    """onnxruntime's, and those of Python's backend on its own stand-in for the same release and card."""
    bundle, gates = tmp_path / "bundle", write_gate(tmp_path, 168)
    dialects = tuple({"ort", RELEASES[release][2]})
    checkpoint = str(tiny_checkpoint(replace(tiny, context=512)))
    export_with(ExportOptions(checkpoint, (3, 5), "fp32", dialects=dialects, reductions=NATIVE, gates=gates), bundle)
    build(bundle, release)
    write_traces(load(bundle, device="cpu", threads=THREADS), tmp_path / "ort")
    with pytest.MonkeyPatch.context() as patch:
        python_traces(patch, bundle, release, tmp_path / "python")
    report = machine(release)
    for reference in ("ort", "python"):
        assert meets(bundle, tmp_path / reference, tmp_path / f"cpp-{reference}") > 60
        assert everything_given_back(report())
    shorten(bundle, RELEASES[release][0], 16)  # prompts in parts, each with its rows of the rotary tables and maps
    assert meets(bundle, tmp_path / "ort", tmp_path / "cpp-parts") > 60
    random_image(5).resize((300, 30)).save(tmp_path / "wide.png")
    done = run("run", "--bundle", bundle, "--device", "tensorrt", tmp_path / "wide.png", "red?")
    assert done.returncode == 1
    assert "a side; use a smaller --max-pixels, --device cpu or openvino" in done.stderr.decode()


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("tiny", [GEMMA3, GEMMA4, PALIGEMMA], ids=lambda tiny: tiny.family)
def test_windows_shared_keys_and_prompts_seen_both_ways_meet_the_traces(
    tiny: Tiny, release: str, tiny_checkpoint: Checkpoints, machine: Machine, tmp_path: Path
) -> None:
    """Of both Python backends, at no K and at several, also in parts, none of which ends within an image of Gemma 3."""
    bundle = exported_for(release, tiny_checkpoint(tiny), tmp_path)
    case = read_index(tmp_path / "ort").cases[0]
    traced = read_tensors(tmp_path / "ort", case.file)
    assert tiny is PALIGEMMA or len(traced["0.ids"]) > 2 * tiny.sliding_window
    report = machine(release)
    for reference in ("ort", "python"):
        assert meets(bundle, tmp_path / reference, tmp_path / f"cpp-{reference}") > 20
        assert everything_given_back(report())
    run_applications(bundle, report)
    if tiny is PALIGEMMA:  # whose prompts go in one part
        return
    shorten(bundle, RELEASES[release][0], 20)
    assert meets(bundle, tmp_path / "ort", tmp_path / "cpp-parts") > 20


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("tiny", [LFM2, QWEN35, MINICPM], ids=lambda tiny: tiny.family)
def test_layers_that_keep_a_state_meet_the_traces(
    tiny: Tiny, release: str, tiny_checkpoint: Checkpoints, machine: Machine, tmp_path: Path
) -> None:
    """Later questions and chats go back to states after the image and turns; at 2 and 8 stages have no K and V."""
    reductions = (f"fastv:k={tiny.attending[0] + 1},ratio=0.5",)
    bundle = exported_for(release, tiny_checkpoint(tiny), tmp_path, (2, 3, 5, 8), reductions)
    report = machine(release)
    for reference in ("ort", "python"):
        assert meets(bundle, tmp_path / reference, tmp_path / f"cpp-{reference}") > 60
        assert everything_given_back(report())
    run_applications(bundle, report)
    shorten(bundle, RELEASES[release][0], 24)
    with pytest.MonkeyPatch.context() as patch:
        python_traces(patch, bundle, release, tmp_path / "parts")
    assert meets(bundle, tmp_path / "parts", tmp_path / "cpp-parts") > 60


@pytest.mark.parametrize("release", BUILT[-1:])
def test_states_stay_on_the_device_and_long_views_are_refused(
    release: str, tiny_checkpoint: Checkpoints, machine: Machine, tmp_path: Path
) -> None:
    """A token copies its K and V, and each state once more than the recorded work does."""
    bundle, report = tmp_path / "bundle", machine(release)
    export(tiny_checkpoint(LFM2), bundle, (2, 3), dialects=("ort", RELEASES[release][2]))
    build(bundle, release)
    made = list[Counter[str]]()
    for count in ("10", "13"):
        done = ask(bundle, tmp_path, "--k", "3", "--reduce", "none", "--max-new-tokens", count, "--ignore-eos")
        assert done.returncode == 0, done.stderr
        made.append(Counter(report()))
    made[1].subtract(made[0])
    stages = Bundle.open(bundle).manifest.stages
    copies = 3 * sum(bool(stage.cached) + bool(stage.stateful) for stage in stages)
    launches = {"cuGraphLaunch": 3, "cuMemcpy2DAsync_v2": copies, "cuStreamSynchronize": 3}
    assert {name: n for name, n in made[1].items() if n and name not in CONTEXTS} == launches
    random_image(5).resize((130, 12)).save(tmp_path / "wide.png")
    done = run("run", "--bundle", bundle, "--device", "tensorrt", tmp_path / "wide.png", "red?")
    assert done.returncode == 1
    with (
        pytest.MonkeyPatch.context() as patch,
        on_python(patch, bundle, release).open([tmp_path / "wide.png"]) as image,
        pytest.raises(DeviceError) as refused,
    ):
        image.ask("red?")
    assert done.stderr.decode() == f"Error: {refused.value}\n"
    assert "use an image less long, --device cpu or openvino" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("release", BUILT[-1:])
def test_half_precision_a_gate_and_clip_s_text_tower_meet_the_traces(
    release: str,
    tiny_checkpoint: Checkpoints,
    reference: References,
    machine: Machine,
    tmp_path: Path,
) -> None:
    tiny = Tiny(image=126, context=768)
    clip = make_clip(tmp_path / "clip", reference(tiny))
    options = ExportOptions(
        str(tiny_checkpoint(tiny)), (3,), "fp16", dialects=("ort", "trt"), reductions=(TOWER, "cls:keep=0.5"),
        gates=write_gate(tmp_path, 168), text_tower=str(clip),
    )  # fmt: skip
    bundle = export_with(options, tmp_path / "bundle").folder
    write_traces(load(bundle, device="cpu", threads=THREADS), tmp_path / "python")
    build(bundle, release)
    report = machine(release)
    assert meets(bundle, tmp_path / "python", tmp_path / "cpp") > 20
    assert everything_given_back(report())


@pytest.mark.parametrize("release", BUILT[-1:])
def test_decoding_is_recorded_once_and_launched_from_then_on(
    release: str, engines: Path, machine: Machine, tmp_path: Path
) -> None:
    report = machine(release)
    done = ask(engines, tmp_path, "--k", "none", "--reduce", "none", "--max-new-tokens", "10", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    with load(engines, device="cpu", threads=THREADS).open([random_image(1)]) as image:
        want = image.ask("red?", "none", reduce="none", max_new_tokens=10, ignore_eos=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["device"], answer["token_ids"]) == ("tensorrt", list(want.token_ids))
    assert report()["cuStreamBeginCapture_v2"] == 1
    assert report()["cuGraphLaunch"] == 9 - 1  # all steps but the first
    before = Counter(report())
    ask(engines, tmp_path, "--k", "none", "--reduce", "none", "--max-new-tokens", "13", "--ignore-eos")
    further = Counter(report())
    further.subtract(before)
    copies = 3 * len(Bundle.open(engines).manifest.stages)  # new K and V of each stage; no logits
    launches = {"cuGraphLaunch": 3, "cuMemcpy2DAsync_v2": copies, "cuStreamSynchronize": 3}
    assert {name: n for name, n in further.items() if n and name not in CONTEXTS} == launches


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("k", ["none", "2", "3"])
def test_hidden_states_of_a_prompt_stay_on_the_device_between_stages(
    k: str, release: str, engines: Path, machine: Machine, tmp_path: Path
) -> None:
    """Out come embeddings, of the prefix and of the question, what the tower gives, and the last token's logits."""
    report = machine(release)
    done = ask(engines, tmp_path, "--k", k, "--reduce", "none", "--max-new-tokens", "1")
    assert done.returncode == 0, done.stderr
    tower = graphs.vision(Bundle.open(engines).manifest, RELEASES[release][2]).outputs
    assert report()["copies out"] == 2 + len(tower) + 1


@pytest.mark.parametrize("release", BUILT)
def test_an_application_that_asks_about_frames_allocates_and_records_for_the_first_alone(
    release: str, engines: Path, machine: Machine
) -> None:
    report, made = machine(release), []
    bundle = Bundle.open(engines)
    for frames in (1, FRAMES):
        early, late = map(int, run("frames", engines, "tensorrt", str(frames)).stdout.split())
        assert everything_given_back(report())
        made.append([report().get(name, 0) for name in ALLOCATIONS])
    assert made[0] == made[1]
    assert late - early < 20_000, f"{late - early} kB more after {FRAMES} frames of {bundle.folder}"


@pytest.mark.parametrize("release", BUILT[-1:])
@pytest.mark.parametrize(
    "refused", ["cuStreamBeginCapture_v2", "execute", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"]
)
def test_what_cannot_be_recorded_is_queued(
    refused: str, release: str, engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_REFUSED", refused)
    done = ask(engines, tmp_path, "--k", "3", "--reduce", "none", "--max-new-tokens", "4", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    with load(engines, device="cpu", threads=THREADS).open([random_image(1)]) as image:
        want = image.ask("red?", 3, reduce="none", max_new_tokens=4, ignore_eos=True)
    assert json.loads(done.stdout)["token_ids"] == list(want.token_ids)
    assert report()["cuStreamBeginCapture_v2"] == 1
    assert "cuGraphLaunch" not in report()
    assert everything_given_back(report())


@pytest.mark.parametrize("release", BUILT)
def test_an_application_may_use_another_gpu(
    release: str, engines: Path, traces: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_DEVICE", "1")
    meets(engines, traces, tmp_path / "cpp")
    assert report()["current"] == 1


@pytest.mark.parametrize("release", BUILT[-1:])
def test_the_second_gpu_is_used_if_it_is_named(
    release: str, engines: Path, traces: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in, which shows two GPUs, refuses every call for another one; the application's own stays the first."""
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_USED", "1")
    meets(engines, traces, tmp_path / "cpp", "tensorrt:1")
    assert report()["current"] == 0
    for device, reason in {
        "tensorrt:2": "tensorrt:2 is not there",
        "cpu:1": "only a GPU has a number",
        "tensorrt:": "only a GPU has a number",
        "tensorrt:-1": "only a GPU has a number",
        "tensorrt:1x": "only a GPU has a number",
    }.items():
        done = run("run", "--bundle", engines, "--device", device, tmp_path / "no.png", "red?")
        assert done.returncode == 1
        assert reason in done.stderr.decode()


@pytest.mark.parametrize("release", BUILT)
def test_parts_are_aligned_and_long_prompts_run_in_parts(
    release: str, tiny_checkpoint: Checkpoints, machine: Machine, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    export_all(
        tiny_checkpoint(Tiny(layers=4, kv_heads=1)), bundle, (2,), max_context=233, reductions=(DUAL, "fastv:k=2")
    )
    build(bundle, release)
    shorten(bundle, RELEASES[release][0], 8)
    write_traces(load(bundle, device="cpu", threads=THREADS), tmp_path / "python")
    report = machine(release)
    assert meets(bundle, tmp_path / "python", tmp_path / "cpp") > 10
    assert everything_given_back(report())
