"""libvtx on TensorRT, over a stand-in that is compiled with TensorRT's own headers and watches every call.

`make cpp-tensorrt TENSORRT=DIRECTORIES` builds plug-ins and stand-ins for the releases whose headers are given and runs
this; elsewhere it is skipped in one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import copy, export, export_with, write_gate
from tests.support.clip import make_clip
from tests.support.cpp import BUILD, needs_cpp, run
from tests.support.engines import on_standin, open_model, rewrite, shorten
from tests.support.exported import THREADS
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.gpu_standin import build_all
from tests.support.reference import Reference
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.backends.tensorrt.engine import MAX_KERNELS
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import SigningKey, write_sealed
from vtx.runtime.bundle.spec import graphs
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.report.golden import logits_limit
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.record import write_traces
from vtx.tools.tensorrt.releases import RTX, TENSORRT, Release

RTX_RELEASE = (
    "1.7"  # whose headers are a stand-in, too: those of another release, and what TensorRT-RTX has in addition
)
RELEASES = {
    RTX_RELEASE: ("sm89", "8.9", "trt"),
    "10.3": ("jetson-orin", "8.7", "trt10"),
    "10.16": ("jetson-thor", "11.0", "trt"),
    "11.1": ("sm90", "9.0", "trt"),
}
BUILT = [release for release in RELEASES if (BUILD / f"libvtx-standin-{release}.so").exists()]
Machine = Callable[[str], Callable[[], dict[str, int]]]
DUAL = "mustdrop:gamma=0.05,alpha=1,tau=off,layers=1/2,key=0.1"
TOWER = "cdpruner:keep=20,text=tower"
FRAMES = int(os.environ.get("VTX_TEST_FRAMES", "30"))
NATIVE = ("fastv:k=2,ratio=0.5", "cdpruner:keep=6", "dart:keep=8,k=3,pivots=2,text_pivots=2")
REDUCTIONS = (DUAL, "fastv:k=2", "cls:keep=0.5+dart:keep=8,k=2", "cdpruner:keep=5")

needs_rtx = pytest.mark.skipif(RTX_RELEASE not in BUILT, reason="built without a stand-in for TensorRT-RTX")
pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not BUILT, reason="built without TensorRT's headers: make cpp-tensorrt TENSORRT=DIRECTORIES"),
]


def build(bundle: Path, release: str) -> None:
    """Engines of the stand-in of a release."""
    target, _, dialect = RELEASES[release]
    major, minor = map(int, release.split("."))
    flavour = RTX if release == RTX_RELEASE else TENSORRT
    build_all(bundle, target, Release(flavour, (major, minor)), dialect, version_of(release))


def version_of(release: str) -> str:
    return f"{release}.1" if release == RTX_RELEASE else f"{release}.0"


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with engines for every release."""
    folder = tmp_path_factory.mktemp("cpp-tensorrt") / "bundle"
    export(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3), reductions=REDUCTIONS)
    for release in BUILT:
        build(folder, release)
    return folder


@pytest.fixture(scope="module")
def traces(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Python does with the bundle, on onnxruntime."""
    folder = tmp_path_factory.mktemp("traces") / "python"
    write_traces(load(exported, device="cpu", threads=THREADS), folder)
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(release)`: from then on tools find the stand-ins of that release; what it gives reads their report."""

    def become(release: str) -> Callable[[], dict[str, int]]:
        libraries, report = tmp_path / release, tmp_path / f"{release}.json"
        libraries.mkdir()
        library = f"libnvinfer.so.{release.partition('.')[0]}"
        if release == RTX_RELEASE:
            library = "libtensorrt_rtx.so.1"
            monkeypatch.setenv("VTX_PLUGINS", os.fspath(BUILD / "standin-rtx"))
        for name in (library, "libcudart.so.13", "libcuda.so.1"):
            (libraries / name).symlink_to(BUILD / f"libvtx-standin-{release}.so")
        monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(libraries))
        monkeypatch.setenv("VTX_STANDIN_CAPABILITY", RELEASES[release][1])
        monkeypatch.setenv("VTX_STANDIN_REPORT", os.fspath(report))
        return lambda: dict[str, int](json.loads(report.read_text()))

    return become


@needs_rtx
def test_tensorrt_rtx_compiles_its_kernels_once_for_a_card(exported: Path, machine: Machine, tmp_path: Path) -> None:
    report, bundle = machine(RTX_RELEASE), copy(exported, tmp_path / "bundle")
    kernels = bundle / "engines/sm89" / fingerprint.KERNELS

    def compiled() -> int:
        done = ask(bundle, tmp_path, "--k", "2", "--reduce", "none", "--max-new-tokens", "4")
        assert done.returncode == 0, done.stderr
        assert everything_given_back(report())
        return report()["compile"]

    kernels.unlink(missing_ok=True)  # of other tests
    first = compiled()
    assert first > 4
    content = kernels.read_bytes()
    assert compiled() == 0
    assert kernels.read_bytes() == content
    for foreign in (content.replace(b"card 8.9", b"card 8.6"), b"damaged", b""):
        kernels.write_bytes(foreign)
        assert compiled() == first
        assert kernels.read_bytes() == content
    with kernels.open("wb") as file:
        file.truncate(MAX_KERNELS + 1)  # too large to be read
    assert compiled() == first
    assert kernels.read_bytes() == content
    kernels.unlink()
    kernels.mkdir()  # as a folder that cannot be written
    assert compiled() == first
    assert not [path for path in kernels.parent.iterdir() if path.name.startswith(".")]


@needs_rtx
def test_kernels_are_neither_read_nor_written_where_a_signature_is_required(
    exported: Path, machine: Machine, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    report, bundle = machine(RTX_RELEASE), only_for(exported, tmp_path / "bundle", "sm89")
    kernels = bundle / "engines/sm89" / fingerprint.KERNELS
    kernels.unlink(missing_ok=True)
    for sealed in (bundle / "vtx.json", bundle / "engines/sm89/engines.json"):
        write_sealed(sealed, sealed.read_bytes(), SigningKey.load(keys[0]))
    for content in (None, b"not signed"):
        if content:
            kernels.write_bytes(content)
        done = ask(bundle, tmp_path, "--max-new-tokens", "2", "--require-signature", str(keys[1]))
        assert done.returncode == 0, done.stderr
        assert report()["compile"] > 4
        assert (kernels.read_bytes() if kernels.exists() else None) == content


def everything_given_back(report: dict[str, int]) -> bool:
    return not any(report[key] for key in ("device", "host", "queued", "graphs", "engines", "contexts"))


def meets(bundle: Path, traces: Path, folder: Path, device: str = "tensorrt") -> int:
    """The number of questions compared, and one; fails with what differs."""
    done = run("traces", bundle, traces, folder, device)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    checks = list(compare_traces(traces, folder, logits_limit(Bundle.open(bundle).manifest, "f32")))
    assert [f"{check.name}: {check.note}" for check in checks if not check.passed] == []
    return len(checks)


@pytest.mark.parametrize("release", BUILT)
def test_every_release_meets_the_traces(
    release: str, exported: Path, traces: Path, machine: Machine, tmp_path: Path
) -> None:
    report = machine(release)
    assert meets(exported, traces, tmp_path / "cpp") > 60
    assert everything_given_back(report())
    assert report().get("cudaGraphLaunch", 0) > 0 or release == RTX_RELEASE  # which records its work by itself
    assert ("captured enqueue" in report()) == (release == RTX_RELEASE)


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("tiny", [QWEN2, QWEN25, QWEN3], ids=lambda tiny: tiny.family)
def test_images_at_their_own_resolution_meet_the_traces_of_both_python_backends(
    tiny: Tiny, release: str, tiny_checkpoint: Callable[..., Path], machine: Machine, tmp_path: Path
) -> None:
    """onnxruntime's, and those of Python's backend on its own stand-in for the same release and card."""
    bundle, gates = tmp_path / "bundle", write_gate(tmp_path, 168)
    dialects = tuple({"ort", RELEASES[release][2]})
    checkpoint = str(tiny_checkpoint(replace(tiny, context=512)))
    export_with(ExportOptions(checkpoint, (3, 5), "fp32", dialects=dialects, reductions=NATIVE, gates=gates), bundle)
    build(bundle, release)
    write_traces(load(bundle, device="cpu", threads=THREADS), tmp_path / "ort")
    with pytest.MonkeyPatch.context() as patch:
        major, minor = map(int, RELEASES[release][1].split("."))
        on_standin(patch, Gpu("Stand-in", (major, minor), 1 << 35, (13, 0)), version_of(release))
        write_traces(open_model(bundle), tmp_path / "python")
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


@pytest.mark.slow
@pytest.mark.parametrize("release", BUILT[-1:])
def test_half_precision_a_gate_and_clip_s_text_tower_meet_the_traces(
    release: str,
    tiny_checkpoint: Callable[..., Path],
    reference: Callable[..., Reference],
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


def ask(bundle: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    random_image(1).save(folder / "a.png")
    return run("run", "--bundle", bundle, "--device", "tensorrt", "--json", folder / "a.png", "red?", *options)


@pytest.mark.parametrize("release", BUILT[-1:])
def test_decoding_is_recorded_once_and_launched_from_then_on(
    release: str, exported: Path, machine: Machine, tmp_path: Path
) -> None:
    report = machine(release)
    done = ask(exported, tmp_path, "--k", "none", "--reduce", "none", "--max-new-tokens", "10", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    with load(exported, device="cpu", threads=THREADS).open([random_image(1)]) as image:
        want = image.ask("red?", "none", reduce="none", max_new_tokens=10, ignore_eos=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["device"], answer["token_ids"]) == ("tensorrt", list(want.token_ids))
    assert report()["cudaStreamBeginCapture"] == 1
    assert report()["cudaGraphLaunch"] == 9 - 1  # all steps but the first
    before = Counter(report())
    ask(exported, tmp_path, "--k", "none", "--reduce", "none", "--max-new-tokens", "13", "--ignore-eos")
    further = Counter(report())
    further.subtract(before)
    copies = 3 * len(Bundle.open(exported).manifest.stages)  # new K and V of each stage; no logits
    launches = {"cudaGraphLaunch": 3, "cudaMemcpy2DAsync": copies, "cudaStreamSynchronize": 3}
    assert {name: n for name, n in further.items() if n and name != "cudaGetDevice"} == launches


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("k", ["none", "2", "3"])
def test_hidden_states_of_a_prompt_stay_on_the_device_between_stages(
    k: str, release: str, exported: Path, machine: Machine, tmp_path: Path
) -> None:
    """Out come embeddings, of the prefix and of the question, what the tower gives, and the last token's logits."""
    report = machine(release)
    done = ask(exported, tmp_path, "--k", k, "--reduce", "none", "--max-new-tokens", "1")
    assert done.returncode == 0, done.stderr
    tower = graphs.vision(Bundle.open(exported).manifest, RELEASES[release][2]).outputs
    assert report()["copies out"] == 2 + len(tower) + 1


ALLOCATIONS = ("cudaMalloc", "cudaHostAlloc", "cudaStreamBeginCapture", "cudaGraphInstantiateWithFlags")


@pytest.mark.parametrize("release", BUILT)
def test_an_application_that_asks_about_frames_allocates_and_records_for_the_first_alone(
    release: str, exported: Path, machine: Machine
) -> None:
    report, made = machine(release), []
    bundle = Bundle.open(exported)
    for frames in (1, FRAMES):
        early, late = map(int, run("frames", exported, "tensorrt", str(frames)).stdout.split())
        assert everything_given_back(report())
        made.append([report().get(name, 0) for name in ALLOCATIONS])
    assert made[0] == made[1]
    assert late - early < 20_000, f"{late - early} kB more after {FRAMES} frames of {bundle.folder}"


@pytest.mark.parametrize("release", BUILT[-1:])
@pytest.mark.parametrize(
    "refused", ["cudaStreamBeginCapture", "execute", "cudaStreamEndCapture", "cudaGraphInstantiate"]
)
def test_what_cannot_be_recorded_is_queued(
    refused: str, release: str, exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_REFUSED", refused)
    done = ask(exported, tmp_path, "--k", "3", "--reduce", "none", "--max-new-tokens", "10", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    with load(exported, device="cpu", threads=THREADS).open([random_image(1)]) as image:
        want = image.ask("red?", 3, reduce="none", max_new_tokens=10, ignore_eos=True)
    assert json.loads(done.stdout)["token_ids"] == list(want.token_ids)
    assert report()["cudaStreamBeginCapture"] == 1
    assert "cudaGraphLaunch" not in report()
    assert everything_given_back(report())


@pytest.mark.parametrize("release", BUILT)
def test_an_application_may_use_another_gpu(
    release: str, exported: Path, traces: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_DEVICE", "1")
    meets(exported, traces, tmp_path / "cpp")
    assert report()["current"] == 1


@pytest.mark.parametrize("release", BUILT[-1:])
def test_the_second_gpu_is_used_if_it_is_named(
    release: str, exported: Path, traces: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in, which shows two GPUs, refuses every call for another one; the application's own stays the first."""
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_USED", "1")
    meets(exported, traces, tmp_path / "cpp", "tensorrt:1")
    assert report()["current"] == 0
    for device, reason in {
        "tensorrt:2": "tensorrt:2 is not there",
        "cpu:1": "only a GPU has a number",
        "tensorrt:": "only a GPU has a number",
        "tensorrt:-1": "only a GPU has a number",
        "tensorrt:1x": "only a GPU has a number",
    }.items():
        done = run("run", "--bundle", exported, "--device", device, tmp_path / "no.png", "red?")
        assert done.returncode == 1
        assert reason in done.stderr.decode()


@pytest.mark.parametrize("release", BUILT)
def test_parts_are_aligned_and_long_prompts_run_in_parts(
    release: str, tiny_checkpoint: Callable[..., Path], machine: Machine, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    export(tiny_checkpoint(Tiny(layers=4, kv_heads=1)), bundle, (2,), max_context=233, reductions=(DUAL, "fastv:k=2"))
    build(bundle, release)
    shorten(bundle, RELEASES[release][0], 8)
    write_traces(load(bundle, device="cpu", threads=THREADS), tmp_path / "python")
    report = machine(release)
    assert meets(bundle, tmp_path / "python", tmp_path / "cpp") > 10
    assert everything_given_back(report())


@pytest.mark.parametrize("release", BUILT[-1:])
def test_a_driver_that_is_too_old_for_cuda_13_is_used_with_cuda_12(
    release: str, exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    monkeypatch.setenv("VTX_STANDIN_TOO_OLD", "1")
    libraries = Path(os.environ["LD_LIBRARY_PATH"])
    said = ask(exported, tmp_path).stderr.decode()
    assert "its NVIDIA driver is missing or older than the CUDA that vtx uses; install a newer driver" in said
    (libraries / "libcudart.so.12").symlink_to(libraries / "libcudart.so.13")
    assert ask(exported, tmp_path).returncode == 0
    assert everything_given_back(report())


@pytest.mark.parametrize("release", BUILT[-1:])
def test_a_gpu_that_is_lost_in_an_answer_is_one_error_with_its_fix(
    release: str, exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    options = ("--k", "3", "--reduce", "none", "--max-new-tokens", "10", "--ignore-eos")
    assert ask(exported, tmp_path, *options).returncode == 0
    waits = report()["cudaStreamSynchronize"]
    monkeypatch.setenv("VTX_STANDIN_WAITS", str(waits - 4))
    done = ask(exported, tmp_path, *options)
    assert (done.returncode, done.stdout) == (1, b"")
    [line] = done.stderr.decode().splitlines()
    assert "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg" in line


@pytest.mark.parametrize("release", BUILT)
def test_an_engine_that_does_not_start_is_one_error_and_nothing_is_freed_before_the_work_behind_it(
    release: str, exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to its inputs, and before them other engines' runs, are queued then: the process ends with them."""
    report, options = machine(release), ("--k", "3", "--reduce", "none", "--max-new-tokens", "2", "--ignore-eos")
    assert ask(exported, tmp_path, *options).returncode == 0
    runs = report()["enqueueV3"]
    for number in (1, 2, runs // 2, runs - 1, runs):
        monkeypatch.setenv("VTX_STANDIN_REFUSED_RUN", str(number))
        done = ask(exported, tmp_path, *options)
        assert (done.returncode, done.stdout) == (1, b""), done.stderr
        [line] = done.stderr.decode().splitlines()
        assert "it does not start the graph" in line
        assert everything_given_back(report())


GONE = "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg"
FAULTS = {
    "answer": r"the KV cache of layers \d to \d needs .* of device memory, 0 B of .* is free; end other programs",
    "prompt": r"the KV cache of layers \d to \d needs .* of device memory, 0 B of .* is free; end other programs",
    "gone": rf"{GONE}\n.*{GONE}\n.*{GONE}",
}


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_gpu_that_fails_in_an_answer_is_a_typed_error_and_the_conversation_stays_usable(
    fault: str, release: str, exported: Path, machine: Machine
) -> None:
    """The program compares its answers with those before; a device that is gone gives the same error each time."""
    report = machine(release)
    done = run("faults", exported, "tensorrt", fault)
    assert (done.returncode, done.stderr) == (0, b""), done
    assert re.search(FAULTS[fault], done.stdout.decode())
    assert everything_given_back(report())


@pytest.mark.skipif(len(BUILT) < 2, reason="built with the headers of one release of TensorRT")
def test_the_tensorrt_that_a_program_has_loaded_is_not_taken_for_the_other_one(
    exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same symbols; a stand-in of another release bears the name of TensorRT-RTX here."""
    report = machine(BUILT[-1])
    other = tmp_path / "libtensorrt_rtx.so.1"
    other.symlink_to(BUILD / f"libvtx-standin-{BUILT[0]}.so")
    monkeypatch.setenv("LD_PRELOAD", os.fspath(other))
    monkeypatch.setenv("VTX_PLUGINS", os.fspath(BUILD))
    done = ask(exported, tmp_path)
    assert done.returncode == 0, done.stderr
    assert report()["enqueueV3"] > 0


def only_for(bundle: Path, folder: Path, target: str = "sm90") -> Path:
    """A copy without the engines of other targets."""
    copied = copy(bundle, folder)
    for other in {other for other, _, _ in RELEASES.values()} - {target}:
        shutil.rmtree(copied / "engines" / other, ignore_errors=True)
    return copied


def _another_version(bundle: Path, target: str) -> None:
    rewrite(bundle, target, version="11.0.7")


def _another_card(bundle: Path, target: str) -> None:
    rewrite(bundle, target, capability=(10, 0))


def _no_engines(bundle: Path, target: str) -> None:
    shutil.rmtree(bundle / "engines")


def _cut_short(bundle: Path, target: str) -> None:
    path = bundle / f"engines/{target}/head.trt.engine"
    path.write_bytes(path.read_bytes()[:-5])


def _refused(bundle: Path, target: str) -> None:
    path = bundle / f"engines/{target}/head.trt.engine"
    path.write_bytes(b"not an engine")
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    record = replace(found.engines["head.trt.onnx"], bytes=13, sha256=hashlib.sha256(b"not an engine").hexdigest())
    rewrite(bundle, target, engines={**found.engines, "head.trt.onnx": record})


def _of_another_graph(bundle: Path, target: str) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    engines = {**found.engines, "head.trt.onnx": found.engines["embed.trt.onnx"]}
    rewrite(bundle, target, engines=engines)


def _of_other_weights(bundle: Path, target: str) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    record = replace(found.engines["head.trt.onnx"], sources={"vtx.json": "0" * 64})
    rewrite(bundle, target, engines={**found.engines, "head.trt.onnx": record})


def _outside(bundle: Path, target: str) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    record = replace(found.engines["head.trt.onnx"], file="../../../x")
    rewrite(bundle, target, engines={**found.engines, "head.trt.onnx": record})


def _damaged(bundle: Path, target: str) -> None:
    write_sealed(bundle / f"engines/{target}/engines.json", b'{"format": 1}')


PROBLEMS: dict[Callable[[Path, str], None], str] = {
    _another_version: "were built for TensorRT 11.0.7 and compute capability 9.0; here is TensorRT 11.1.0 and",
    _another_card: "compute capability 10.0; here is compute capability 9.0 (Stand-in); build them with: vtx-build",
    _no_engines: "holds no engines; build them with: vtx-build",
    _cut_short: "it is cut short; build them with",
    _refused: "TensorRT does not take head.trt.engine: Serialization assertion stdArchiveReader failed; build them",
    _of_another_graph: "is not the graph that vtx.json says it is",
    _of_other_weights: "was built from another vtx.json than this bundle's",
    _outside: "leaves the bundle",
    _damaged: "engines.json is damaged",
}


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
@pytest.mark.parametrize("change", PROBLEMS, ids=lambda change: change.__name__.strip("_"))
def test_engines_that_do_not_fit_are_refused_in_one_line(
    change: Callable[[Path, str], None], exported: Path, machine: Machine, tmp_path: Path
) -> None:
    machine("11.1")
    bundle = only_for(exported, tmp_path / "bundle")
    change(bundle, "sm90")
    done = ask(bundle, tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    [line] = done.stderr.decode().splitlines()
    assert PROBLEMS[change] in line


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VTX_STANDIN_CAPABILITY", "", "no NVIDIA GPU answers here"),
        ("VTX_STANDIN_MEMORY", "100000", "100 kB of 100 kB of the device is free; export with a smaller --precision"),
        (
            "VTX_PLUGINS",
            "/nowhere",
            "TensorRT 11.1.0 is here (libnvinfer.so.11), but /nowhere has no plug-in of libvtx",
        ),
        ("VTX_TENSORRT", "/nowhere/libnvinfer.so.11", "TensorRT was not found (/nowhere/libnvinfer.so.11"),
        ("VTX_CUDART", "/nowhere/libcudart.so.13", "the CUDA runtime was not found (/nowhere/libcudart.so.13"),
    ],
)
def test_a_machine_that_cannot_run_engines_says_why(
    variable: str,
    value: str,
    message: str,
    exported: Path,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine("11.1")
    monkeypatch.setenv(variable, value)
    bundle = only_for(exported, tmp_path / "bundle")
    done = ask(bundle, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.decode()


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
@pytest.mark.parametrize(
    ("library", "instead", "message"),
    [
        ("libcuda.so.1", None, "no NVIDIA GPU answers here"),
        ("libnvinfer.so.11", None, "TensorRT was not found (libnvinfer.so.11"),
        ("libnvinfer.so.11", "libnvinfer.so.10", "TensorRT was not found (libnvinfer.so.11"),
    ],
)
def test_a_library_that_is_missing_or_of_another_major_release_is_named(
    library: str, instead: str | None, message: str, exported: Path, machine: Machine, tmp_path: Path
) -> None:
    machine("11.1")
    found = Path(os.environ["LD_LIBRARY_PATH"]) / library
    if instead:
        (found.parent / instead).symlink_to(BUILD / "libvtx-standin-11.1.so")
    found.unlink()
    done = ask(only_for(exported, tmp_path / "bundle"), tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    [line] = done.stderr.decode().splitlines()
    assert message in line


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
def test_memory_that_is_gone_after_the_forecast_is_named_with_its_purpose(
    exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each amount of memory, from where the forecast fits to where an answer does, gives an error of one line."""
    report, bundle, said = machine("11.1"), only_for(exported, tmp_path / "bundle"), []
    for memory in range(180_000, 3_000_000, 150_000):
        monkeypatch.setenv("VTX_STANDIN_MEMORY", str(memory))
        done = ask(bundle, tmp_path, "--max-new-tokens", "2")
        assert everything_given_back(report())
        if done.returncode == 0:
            break
        [line] = done.stderr.decode().splitlines()
        said.append(line)
    assert done.returncode == 0
    assert any(re.search(r"the tensor \w+ needs .* of device memory, .* is free; end other", line) for line in said)
    assert all("device memory" in line or "of the device is free" in line for line in said)


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
def test_auto_goes_on_where_the_gpu_has_no_room(
    exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine("11.1")
    monkeypatch.setenv("VTX_STANDIN_MEMORY", "20000")
    bundle = only_for(exported, tmp_path / "bundle")
    assert ask(bundle, tmp_path).returncode == 1
    asked = (tmp_path / "image.png", "red?", "--max-new-tokens", "2")
    random_image(1).save(asked[0])
    done = run("run", "--bundle", bundle, "--device", "auto", "--json", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] in ("cpu", "openvino")
    assert everything_given_back(report())


@pytest.mark.skipif(find_spec("tensorrt_rtx_libs") is None, reason="TensorRT-RTX is not installed")
def test_the_library_of_tensorrt_rtx_says_its_version(
    exported: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec("tensorrt_rtx_libs")
    assert spec is not None
    machine(BUILT[-1])
    monkeypatch.setenv("VTX_STANDIN_CAPABILITY", "8.9")
    monkeypatch.setenv("VTX_TENSORRT", next(iter(spec.submodule_search_locations or ())))
    bundle = copy(exported, tmp_path / "bundle")
    shutil.rmtree(bundle / "engines")
    build_all(bundle, version="1.0.0")
    said = ask(bundle, tmp_path).stderr.decode()
    assert "built for TensorRT-RTX 1.0.0 and compute capability 8.9; here is TensorRT-RTX 1." in said
    here = said.partition("here is TensorRT-RTX ")[2].partition(" ")[0]
    rewrite(bundle, "sm89", version=here)
    said = ask(bundle, tmp_path).stderr.decode()
    assert f"TensorRT-RTX {here} is here (" in said
    assert "no plug-in of libvtx for it; build libvtx with its headers" in said
