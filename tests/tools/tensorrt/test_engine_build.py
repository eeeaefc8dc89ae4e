"""Building engines: what is asked of the child, what becomes of its death, what is rebuilt and what is kept."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.bundles import IGNORE, copy, export_all, flip, manifest, write_manifest
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import RTX_17
from tests.support.tiny import Tiny

from vtx.cli import build as command
from vtx.cli import export as export_command
from vtx.runtime.backends.ort.cuda import OrtCudaBackend
from vtx.runtime.bundle.bundle import Bundle, sha256
from vtx.runtime.bundle.fingerprint import EngineRecord, read_engines
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError, DeviceError, ExportError, RequestError
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.report.golden import read_golden
from vtx.tools.tensorrt import build as engines
from vtx.tools.tensorrt.build import EnginePlan, build_engines, check_memory, plan_engines
from vtx.tools.tensorrt.child import BuildRequest, BuiltEngine, build
from vtx.tools.tensorrt.graph import SeenGraph, load_graph
from vtx.tools.tensorrt.memory import BUILDER_MEMORY
from vtx.tools.tensorrt.profiles import input_shapes
from vtx.tools.tensorrt.releases import RTX, TENSORRT, Release
from vtx.tools.tensorrt.targets import TARGETS, find_target, load_tensorrt
from vtx.tools.tensorrt.worker import BuildProgress

ADA = TARGETS["sm89"]
ORIN = Gpu("Orin", (8, 7), 8 << 30, (12, 6))
CARD = Gpu("RTX 4090", (8, 9), 24 << 30, (13, 0))


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "bundle"
    return export_all(tiny_checkpoint(Tiny(layers=3)), folder, (2,)).folder


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Bundle:
    return Bundle.open(copy(exported, tmp_path / "bundle"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that a builder was asked for; it writes what it was asked as the engine."""
    asked: list[str] = []

    def fake(request: BuildRequest, watch: Any) -> BuiltEngine:
        asked.append(request.graph.name)
        request.engine.write_text(request.to_json())
        return BuiltEngine(request.engine.stat().st_size, sha256(request.engine), 0.5, 1 << 20)

    monkeypatch.setattr(engines, "build", fake)
    return asked


ORIN_10 = Release(TENSORRT, (10, 3))


def plan(bundle: Bundle, **changes: Any) -> EnginePlan:
    return replace(plan_engines(bundle, ADA, Release(RTX, (1, 7)), "1.7.1", "trt10"), **changes)


def run(bundle: Bundle, **changes: Any) -> list[str]:
    return [outcome.record.file for outcome in build_engines(plan(bundle, **changes), IGNORE) if outcome.built]


# --- float16's range ------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_beyond_float16_are_recorded_and_no_engine_is_built_that_would_overflow(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint(Tiny(layers=3)), checkpoint)
    (path,) = checkpoint.glob("*.safetensors")
    weights = load_file(path)
    (name,) = (name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name] *= np.float32(2e6)
    save_file(weights, path, {"format": "pt"})
    rtx, bundles = Release(RTX, (1, 7)), {}
    for precision in ("bf16", "int8"):
        words = ["--model", str(checkpoint), "--k", "3", "--precision", precision]
        done = CliRunner().invoke(export_command, [*words, "--out", str(tmp_path / precision)])
        assert done.exit_code == 0, done.stderr
        assert ("warning: layer " in done.stderr) == (precision == "int8")
        bundles[precision] = Bundle.open(tmp_path / precision)
    largest = read_golden(bundles["bf16"])["largest"]
    assert largest[0] < 65504 < min(largest[1:])
    plan_engines(bundles["bf16"], ADA, rtx, "1.7.1", "trt")
    for dialect in names.TENSORRT:
        with pytest.raises(
            BundleError, match=r"layer [23] reaches [\d,]+ on the golden prompt, float16 ends at 65,504"
        ):
            plan_engines(bundles["int8"], ADA, rtx, "1.7.1", dialect)
    obstacle = str(OrtCudaBackend.obstacle(bundles["int8"]))
    assert "graphs for GPUs would answer nonsense" in obstacle
    words = ["--model", str(checkpoint), "--k", "3", "--precision", "int8", "--kv-precision", "fp32"]
    assert " ".join(words[-2:]) in obstacle
    done = CliRunner().invoke(export_command, [*words, "--out", str(tmp_path / "wide")])
    assert "warning: layer " not in done.stderr
    plan_engines(Bundle.open(tmp_path / "wide"), ADA, rtx, "1.7.1", "trt")


# --- what is built, and what is kept --------------------------------------------------------------


def test_an_engine_of_every_graph_lies_in_the_bundle_and_is_recorded(bundle: Bundle, made: list[str]) -> None:
    run(bundle)
    record = read_engines(bundle, "sm89")
    assert set(record.engines) == set(made) == {
        "vision.trt10.onnx", "embed.trt10.onnx", "stage-01-01.trt10.onnx", "stage-02-03.trt10.onnx", "head.trt10.onnx",
        "score.trt10.onnx",
    }  # fmt: skip
    assert (record.flavour, record.version, record.capability) == (RTX, "1.7.1", (8, 9))
    folder = bundle.path("engines/sm89")
    assert {path.name for path in folder.iterdir()} == {r.file for r in record.engines.values()} | {
        "engines.json",
        "engines.json.sha256",
    }
    assert Bundle.open(bundle.folder).manifest == bundle.manifest  # the bundle itself is as it was


def test_a_second_build_keeps_every_engine(bundle: Bundle, made: list[str]) -> None:
    run(bundle)
    made.clear()
    assert run(bundle) == []
    assert made == []


@pytest.mark.parametrize(
    "changes", [{"version": "1.8.0"}, {"workspace": 1 << 30}, {"target": replace(ADA, capability=(8, 6))}], ids=str
)
def test_another_release_option_or_gpu_rebuilds_all(changes: dict[str, Any], bundle: Bundle, made: list[str]) -> None:
    everything = run(bundle)
    assert run(bundle, **changes) == everything


def test_only_the_engine_of_a_changed_graph_is_rebuilt(bundle: Bundle, made: list[str]) -> None:
    run(bundle)
    value = manifest(bundle.folder)
    value["files"]["head.trt10.onnx"]["sha256"] = "0" * 64
    write_manifest(bundle.folder, value)
    assert run(Bundle.open(bundle.folder, check=False)) == ["head.trt10.engine"]


def test_changed_weights_rebuild_the_graphs_that_read_them(bundle: Bundle, made: list[str]) -> None:
    run(bundle)
    value = manifest(bundle.folder)
    weights = next(name for name in value["files"] if name.startswith("weights/"))
    value["files"][weights]["sha256"] = "0" * 64
    write_manifest(bundle.folder, value)
    assert "stage-02-03.trt10.engine" in run(Bundle.open(bundle.folder, check=False))


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_engine_is_rebuilt(damage: str, bundle: Bundle, made: list[str]) -> None:
    run(bundle)
    path = bundle.path("engines/sm89/head.trt10.engine")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flip":
        flip(path)
    else:
        path.unlink()
    assert run(bundle) == ["head.trt10.engine"]


def test_what_a_killed_build_left_is_removed(bundle: Bundle, made: list[str]) -> None:
    folder = bundle.path("engines/sm89")
    folder.mkdir(parents=True)
    for name in ("stage-09-09.trt10.engine", ".head.trt10.engine.partial-ab", "note.txt"):
        (folder / name).write_bytes(b"x")
    run(bundle)
    assert not (folder / "stage-09-09.trt10.engine").exists()
    assert not (folder / ".head.trt10.engine.partial-ab").exists()
    assert (folder / "note.txt").exists()  # not ours


def test_a_builder_that_fails_leaves_what_was_built_before_it(
    bundle: Bundle, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = engines.build

    def fails_at_the_head(request: BuildRequest, watch: Any) -> BuiltEngine:
        if request.graph.name.startswith("head"):
            request.engine.write_bytes(b"half")
            raise ExportError("no")
        return good(request, watch)

    monkeypatch.setattr(engines, "build", fails_at_the_head)
    with pytest.raises(ExportError, match="no"):
        run(bundle)
    assert "head.trt10.onnx" not in read_engines(bundle, "sm89").engines
    assert not list(bundle.path("engines/sm89").glob(".*"))
    monkeypatch.setattr(engines, "build", good)
    assert run(bundle) == ["head.trt10.engine", "score.trt10.engine"]


def test_two_builds_of_one_target_do_not_meet(bundle: Bundle, made: list[str]) -> None:
    first = build_engines(plan(bundle), IGNORE)
    next(first)
    with pytest.raises(ExportError, match="another vtx-build works on"):
        run(bundle)
    list(first)


# --- before anything is built ---------------------------------------------------------------------


def test_graphs_that_the_release_does_not_read_are_refused_with_the_first_finding(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"vision\.ort\.onnx.*for TensorRT-RTX 1\.7 export the 'trt' dialect.*more"):
        plan_engines(bundle, ADA, Release(RTX, (1, 7)), "1.7", "ort")


def test_too_little_memory_is_said_before_the_build(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plan(bundle)
    monkeypatch.setattr(engines, "available_memory", lambda: asked.memory - 1)
    with pytest.raises(ExportError, match=r"needs about .* of memory, .* is free; use a machine with more"):
        check_memory(asked)
    monkeypatch.setattr(engines, "available_memory", lambda: asked.memory)
    check_memory(asked)


def test_stages_of_tensorrt_get_a_profile_for_one_row_and_one_for_prompts(bundle: Bundle) -> None:
    context = bundle.manifest.max_context
    asked = plan_engines(bundle, TARGETS["jetson-orin"], Release(TENSORRT, (10, 3)), "10.3", "trt10")
    jobs = {job.graph.name: job for job in asked.jobs}
    decode, prefill = jobs["stage-02-03.trt10.onnx"].profiles
    assert decode["tokens"] == decode["batch"] == (1, 1, 2)
    assert decode["each"] == prefill["batch"] == (1, 1, 1)
    assert prefill["tokens"][0] == 2
    assert prefill["tokens"][2] == context
    shapes = input_shapes(jobs["stage-02-03.trt10.onnx"].graph, decode)
    assert shapes["hidden"] == tuple((count, bundle.manifest.model.hidden) for count in (1, 1, 2))
    assert shapes["past_key.3"][0][1] == 0
    assert jobs["vision.trt10.onnx"].profiles[0]["images"] == (1, 1, 1)
    assert jobs["head.trt10.onnx"].profiles[0]["tokens"][2] <= 16


def test_stages_for_one_conversation_get_one_profile_from_one_row_to_all(bundle: Bundle) -> None:
    alone = plan_engines(bundle, ADA, RTX_17, "1.7.1", "trt10", batch=1)
    jobs = {job.graph.name: job for job in alone.jobs}
    (profile,) = jobs["stage-02-03.trt10.onnx"].profiles
    assert (profile["tokens"][0], profile["tokens"][2]) == (1, bundle.manifest.max_context)


@pytest.mark.parametrize("release", [RTX_17, ORIN_10])
@pytest.mark.parametrize(("batch", "count"), [(None, 2), (1, 1)])
def test_single_tokens_have_a_profile_of_their_own_unless_a_run_is_of_one_conversation(
    release: Release, batch: int | None, count: int, bundle: Bundle
) -> None:
    target = "sm89" if release is RTX_17 else "jetson-orin"
    asked = plan_engines(bundle, TARGETS[target], release, "1.7.1", "trt10", batch=batch)
    assert {len(job.profiles) for job in asked.jobs if job.graph.name.startswith("stage")} == {count}
    assert {len(job.profiles) for job in asked.jobs if not job.graph.name.startswith("stage")} == {1}


def test_graphs_that_keep_the_state_of_one_conversation_are_refused_for_several(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(path: Path) -> SeenGraph:
        graph = load_graph(path)
        return replace(graph, shapes={**graph.shapes, "state": (2, 1, 64)}) if "stage" in path.name else graph

    monkeypatch.setattr(engines, "load_graph", loaded)
    with pytest.raises(BundleError, match="keep the state of one conversation; export the bundle again, or use --ba"):
        plan(bundle)
    assert plan_engines(bundle, ADA, RTX_17, "1.7.1", "trt", batch=1).jobs


@pytest.mark.slow
def test_int8_weights_are_counted_as_the_plan_counts_them(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """By TensorRT proper as float16, whatever it holds them in."""
    made = export_all(tiny_checkpoint(Tiny(layers=3)), tmp_path / "int8", (2,), "int8")
    memories = []
    for release in (RTX_17, ORIN_10):
        asked = plan_engines(made, ADA, release, "1.7.1", "trt10")
        memories.append({job.graph.name: job.memory - BUILDER_MEMORY for job in asked.jobs})
    rtx, proper = memories
    assert 1.9 < proper["stage-02-03.trt10.onnx"] / rtx["stage-02-03.trt10.onnx"] <= 2
    assert proper["embed.trt10.onnx"] == rtx["embed.trt10.onnx"]


def test_an_engine_larger_than_its_weights_allow_is_pointed_out(bundle: Bundle) -> None:
    job = plan(bundle).jobs[0]
    record = EngineRecord(job.file, 0, "", {}, ())
    job = replace(job, graph=replace(job.graph, weights=100 << 20))
    assert job.excess(replace(record, bytes=125 << 20)) is None
    assert job.excess(replace(record, bytes=200 << 20)) == 2
    assert replace(job, graph=replace(job.graph, weights=1 << 20)).excess(replace(record, bytes=8 << 20)) is None


def test_a_free_size_that_nobody_declared_is_an_error(bundle: Bundle) -> None:
    graph = load_graph(bundle.path("head.trt10.onnx"))
    with pytest.raises(BundleError, match="size 'tokens' of hidden is in no profile"):
        input_shapes(graph, {"images": (1, 1, 1)})


# --- the child ------------------------------------------------------------------------------------


def request(tmp_path: Path) -> BuildRequest:
    return BuildRequest(RTX, tmp_path / "g.onnx", tmp_path / "g.engine", (8, 9), ())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"died \(signal SIGSEGV\)"),
        ("import sys; print('boom: 42', file=sys.stderr); sys.exit(7)", r"died \(exit status 7\): boom: 42"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"SIGKILL\); the memory was probably too small"),
        ("pass", r"died \(exit status 0\)"),
        (
            """print('{"error": "no such layer"}')""",
            r"TensorRT cannot build g\.onnx: no such layer; the bundle",
        ),
    ],
    ids=["crash", "exit", "killed", "silence", "refusal"],
)
def test_the_end_of_a_builder_is_an_error_message(script: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        build(request(tmp_path), lambda *_: None, ("-c", script))


def test_progress_and_result_come_from_the_child(tmp_path: Path) -> None:
    script = (
        "import json, sys; asked = json.loads(sys.stdin.readline());"
        """print(json.dumps({"phase": asked["flavour"], "share": 0.5}));"""
        """print(json.dumps({"bytes": 1, "sha256": "a", "seconds": 2.0, "memory": 3}))"""
    )
    told: list[tuple[str, float]] = []
    assert build(request(tmp_path), lambda *event: told.append(event), ("-c", script)) == BuiltEngine(1, "a", 2.0, 3)
    assert told == [(RTX, 0.5)]


def test_an_interrupt_ends_the_child_before_it_goes_on(tmp_path: Path) -> None:
    mark = tmp_path / "gave-up"
    script = (
        "import sys, pathlib; sys.stdin.readline();"
        """print('{"phase": "p", "share": 0}', flush=True);"""
        f"sys.stdin.read(); pathlib.Path({str(mark)!r}).touch()"
    )

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(request(tmp_path), interrupted, ("-c", script))
    assert mark.exists()


def test_progress_fills_the_running_step_of_the_outer_phase() -> None:
    progress = BuildProgress()
    progress.start("engine", None, 2)
    progress.step("engine", 0)
    assert progress.share == 1 / 2
    progress.start("layers", "engine", 4)
    progress.step("layers", 0)
    assert progress.share == (1 + 1 / 4) / 2
    progress.step("layers", 3)
    progress.finish("layers")
    progress.step("engine", 1)
    assert progress.share == 1


def test_progress_stays_where_it_is_when_a_second_phase_starts_within_a_step() -> None:
    progress = BuildProgress()
    progress.start("engine", None, 3)
    progress.step("engine", 1)
    progress.start("first", "engine", 60)
    progress.step("first", 0)
    reached = progress.share
    assert reached == (2 + 1 / 60) / 3
    progress.finish("first")
    progress.start("second", "engine", 1000)
    progress.step("second", 0)  # alone it would be at (2 + 1 / 1000) / 3
    assert progress.share == reached


def test_progress_does_not_start_over_with_a_further_outermost_phase() -> None:
    progress = BuildProgress()
    for name in ("parse", "engine"):
        progress.start(name, None, 10)
        progress.step(name, 8 if name == "parse" else 0)
        progress.finish(name)
        assert progress.share == 9 / 10


# --- targets --------------------------------------------------------------------------------------


def test_an_unknown_target_lists_all() -> None:
    with pytest.raises(
        RequestError, match=r"'rtx9' is unknown; the targets are: this, sm80 .*jetson-orin \(Jetson Orin"
    ):
        find_target("rtx9")


def test_a_card_that_rtx_does_not_support_is_sent_to_the_flavour_that_does() -> None:
    with pytest.raises(RequestError, match=r"does not support sm87; .*jetson-orin .*TensorRT 10\.3"):
        find_target("sm87")
    assert find_target("sm90").release.flavour == TENSORRT


def test_this_machine_without_a_gpu_asks_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtx.tools.tensorrt.targets.find_gpu", lambda *_: None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU was detected here; name a --target"):
        find_target("this")


def test_engines_of_tensorrt_itself_are_built_on_their_own_machine() -> None:
    with pytest.raises(DeviceError, match=r"copy the bundle to the Jetson Orin with JetPack 6 and run"):
        load_tensorrt(TARGETS["jetson-orin"], CARD)


@pytest.mark.parametrize(
    ("target", "gpu", "wheel"), [("sm89", CARD, r"vtx-edge\[rtx\]"), ("jetson-orin", ORIN, "apt-get")]
)
def test_without_tensorrt_it_says_what_to_install(
    target: str, gpu: Gpu, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flavour in (RTX, TENSORRT):
        monkeypatch.setitem(sys.modules, flavour, None)
    with pytest.raises(DeviceError, match=rf"is not installed; .*{wheel}"):
        load_tensorrt(TARGETS[target], gpu)


@pytest.mark.parametrize(
    ("target", "extra"), [("sm89", "rtx"), ("sm90", "tensorrt"), ("jetson-orin", "jetson"), ("jetson-thor", "jetson")]
)
def test_missing_libraries_are_named_with_the_extra_of_the_target(
    target: str, extra: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("onnx", "polygraphy"):
        monkeypatch.setitem(sys.modules, module, None)
    asked = ["--bundle", str(bundle.folder), "--target", target]
    result = CliRunner().invoke(command, asked)
    assert result.exit_code == 1
    want = f'vtx-build needs onnx and polygraphy, not installed here; pip install "vtx-edge[{extra}]"'
    assert result.output == f"build: {want}\n"
    monkeypatch.delitem(sys.modules, "onnx")
    assert CliRunner().invoke(command, [*asked, "--check"]).exit_code == 0


# --- the command ----------------------------------------------------------------------------------


def test_the_command_judges_without_tensorrt_and_without_a_gpu(bundle: Bundle) -> None:
    result = CliRunner().invoke(command, ["--bundle", str(bundle.folder), "--target", "jetson-orin", "--check"])
    assert result.exit_code == 0, result.output
    assert "trt10 on Jetson Orin with JetPack 6, TensorRT 10.3: TensorRT reads every graph" in result.output


def test_the_command_names_the_faults_of_the_wrong_dialect(bundle: Bundle) -> None:
    asked = ["--bundle", str(bundle.folder), "--target", "jetson-orin-jp7", "--dialect", "ort", "--check"]
    result = CliRunner().invoke(command, asked)
    assert result.exit_code == 1
    assert "GroupQueryAttention" in result.output
    assert "findings, see above; build from the dialect named there" in result.output


def test_rtx_takes_no_timing_cache(bundle: Bundle) -> None:
    asked = ["--bundle", str(bundle.folder), "--target", "sm89", "--timing-cache", "cache"]
    result = CliRunner().invoke(command, asked)
    assert result.exit_code == 1
    assert "measures no kernels when it builds; leave --timing-cache out" in result.output
