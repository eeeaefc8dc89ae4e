"""The TensorRT backend over stand-ins that watch every call: the numbers, the memory, and what does not fit."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_standin
from tests.support.bundles import copy, export
from tests.support.exported import QUESTIONS, THREADS, greedy, prompt
from tests.support.gpu_standin import Gpu, build_all
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.devices import choose
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import write_sealed
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError, ContextError, DeviceError
from vtx.runtime.host import gpu
from vtx.runtime.report.compare import compare, first_difference
from vtx.runtime.units import size
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.tensorrt.releases import TENSORRT, Release

ORIN = gpu.Gpu("Orin", (8, 7), 8 << 30, (12, 6))
CARD = gpu.Gpu("RTX 4090", (8, 9), 24 << 30, (13, 0))
DUAL = "mustdrop:gamma=0.05,alpha=1,tau=off,layers=1/2"
WORDS = [
    "fastv:k=2",
    f"{DUAL},key=0",
    f"{DUAL},key=0,positions=renumber",
    f"{DUAL},key=0.2",
    "cls:keep=0.5",
    "lsm:tau=-1",
    "mustdrop:192,layers=1/2",
    "dart:keep=8",
    "dart:keep=5,k=0",
    "cdpruner:keep=5",
]
VERSION = gpu_standin.VERSION
STEPS = 6


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt") / "bundle"
    export(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3))
    build_all(folder)
    return folder


@pytest.fixture(scope="module")
def reducing(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt") / "bundle"
    words = (f"{DUAL},key=0.1", "fastv:k=2", "cls", "lsm", "mustdrop:192,layers=1/2", "dart")
    export(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3), reductions=words)
    build_all(folder)
    return folder


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The stand-in for the GPU, found wherever the backend looks for one."""
    found = Gpu()
    monkeypatch.setattr(tensorrt, "load_cuda", lambda: found)
    monkeypatch.setattr(tensorrt, "load_flavour", lambda _: gpu_standin.module(found, VERSION))
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: CARD)
    return found


def open_model(folder: Path) -> Model:
    bundle = Bundle.open(folder)
    return Model(bundle, TensorrtBackend(bundle), 0.0)


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 2, 3])
def test_answers_are_those_of_onnxruntime(k: int | None, exported: Path, device: Gpu) -> None:
    ours, reference = open_model(exported), load(exported, device="cpu", threads=THREADS)
    for number, question in enumerate(QUESTIONS):
        images = [random_image(number)]
        want = greedy(reference, prompt(reference, prompt_messages(question), images), k, STEPS)
        got = greedy(ours, prompt(ours, prompt_messages(question), images), k, STEPS)
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("word", WORDS)
def test_reductions_keep_and_answer_as_on_onnxruntime(word: str, reducing: Path, device: Gpu) -> None:
    same_answers(open_model(reducing), load(reducing, device="cpu", threads=THREADS), word)


def same_answers(ours: Model, reference: Model, word: str) -> None:
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2, 3):
            for question in QUESTIONS:
                got, want = (talk.ask(question, k, Options(STEPS), reduce=word) for talk in (mine, theirs))
                assert got.token_ids == want.token_ids
                assert got.stats.reduced == want.stats.reduced
                assert got.stats.kv_slots == want.stats.kv_slots


def test_a_profile_for_decoding_and_one_for_prompts_answer_the_same(
    exported: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(exported, tmp_path / "bundle")
    build_all(folder, "jetson-thor", Release(TENSORRT, (10, 16)))
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: gpu.Gpu("Thor", (11, 0), 1 << 37, (13, 0)))
    ours, reference = open_model(folder), load(exported, device="cpu", threads=THREADS)
    assert {len(r.profiles) for g, r in ours.backend.engine_set.engines.items() if g.startswith("stage")} == {2}
    images, messages = [random_image(3)], prompt_messages(QUESTIONS[1])
    want, got = (greedy(m, prompt(m, messages, images), 3, STEPS) for m in (reference, ours))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.fixture
def grown(exported: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with engines for JetPack 6, whose caches grow, on that machine."""
    folder = copy(exported, tmp_path / "grown")
    build_all(folder, "jetson-orin", Release(TENSORRT, (10, 3)), "plain")
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: ORIN)
    return folder


@pytest.mark.parametrize("k", [None, 2, 3])
def test_caches_that_grow_answer_the_same(k: int | None, grown: Path) -> None:
    ours, reference = open_model(grown), load(grown, device="cpu", threads=THREADS)
    for number, question in enumerate(QUESTIONS):
        images, messages = [random_image(number)], prompt_messages(question)
        want, got = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (reference, ours))
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("word", WORDS)
def test_reductions_work_where_caches_grow(
    word: str, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(reducing, tmp_path / "grown")
    build_all(folder, "jetson-orin", Release(TENSORRT, (10, 3)), "plain")
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: ORIN)
    same_answers(open_model(folder), load(folder, device="cpu", threads=THREADS), word)


@pytest.mark.slow
def test_a_conversation_over_caches_that_grow_goes_on(grown: Path) -> None:
    ours, reference = open_model(grown), load(grown, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in ("none", 2, 3, "none", 2):
            for question in QUESTIONS:
                assert mine.ask(question, k).token_ids == theirs.ask(question, k).token_ids


@pytest.mark.parametrize("slots", [[], [0], [1, 3, 4], list(range(5))])
def test_slots_of_a_growing_cache_come_back_where_they_are_put(slots: list[int], grown: Path) -> None:
    ours, reference = open_model(grown), load(grown, device="cpu", threads=THREADS)
    rows = np.random.default_rng(0).standard_normal((6, ours.manifest.model.hidden)).astype(np.float32)
    after = []
    for model in (ours, reference):
        cache = model.backend.stage(1, 12)
        cache.append(TokenStates(rows), np.arange(6))
        cache.keep(5)
        kept = cache.read(np.array(slots, np.int64))
        whole = cache.read(np.arange(5))
        cache.write(np.arange(len(slots)), kept, length=len(slots))
        shorter = cache.append(TokenStates(rows[:2]), np.array([7, 8])).copy()
        cache.keep(len(slots))
        cache.write(np.arange(5), whole, length=5)
        after.append((shorter, cache.append(TokenStates(rows[:1]), np.array([9])).copy()))
    for ours_rows, theirs in zip(*after, strict=True):
        np.testing.assert_allclose(ours_rows, theirs, atol=1e-4)


@pytest.mark.slow
def test_one_conversation_goes_on_with_what_it_has(exported: Path, device: Gpu) -> None:
    ours, reference = open_model(exported), load(exported, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2, 3, "none", 2):
            for question in QUESTIONS:
                assert mine.ask(question, k or "none").token_ids == theirs.ask(question, k or "none").token_ids


def test_decoding_is_recorded_once_and_launched_from_then_on(exported: Path, device: Gpu) -> None:
    model = open_model(exported)
    asked = prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)])
    greedy(model, asked, None, 10)
    stages = len(model.manifest.stages)
    assert device.calls["cudaStreamBeginCapture"] == stages
    assert device.calls["cudaGraphLaunch"] == stages * (9 - 1)  # all steps but each stage's first


def test_no_memory_is_taken_while_decoding(exported: Path, device: Gpu) -> None:
    model = open_model(exported)
    asked = prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)])
    greedy(model, asked, None, 3)
    calls = ("cudaMalloc", "cudaHostAlloc")
    held = model.backend.stage(0, 16)  # the memory of the answer
    before = device.calls["cudaMalloc"]
    cache = model.backend.stage(0, 16)
    after_cache = [device.calls[call] for call in calls]
    rows = np.zeros((1, model.manifest.model.hidden), np.float32)
    for position in range(8):
        cache.append(TokenStates(rows), np.array([position]))
    assert held.length == 0
    assert after_cache[0] == before + 1  # the cache itself, one buffer
    assert [device.calls[call] for call in calls] == after_cache


def test_everything_is_given_back(exported: Path, device: Gpu) -> None:
    model = open_model(exported)
    greedy(model, prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), 2, 3)
    assert device.device
    del model
    gc.collect()
    assert not device.device
    assert not device.host
    assert not any(device.graphs.values())


@pytest.mark.parametrize("slots", [[], [0], [0, 1, 2], [1, 3, 4, 8], list(range(9))])
def test_saved_slots_come_back_where_they_are_put(slots: list[int], exported: Path, device: Gpu) -> None:
    model = open_model(exported)
    random = np.random.default_rng(0)
    first, other = random.standard_normal((2, 9, model.manifest.model.hidden)).astype(np.float32)
    cache = model.backend.stage(1, 16)
    cache.append(TokenStates(first), np.arange(9))
    before = _content(cache, model.manifest)
    saved = cache.read(np.array(slots, np.int64))
    cache.keep(0)
    cache.append(TokenStates(other), np.arange(9))
    expected = _content(cache, model.manifest)
    assert not np.isclose(before[..., :9, :], expected[..., :9, :]).all(-1).any()  # no slot holds what it held
    cache.write(np.arange(len(slots)), saved, length=9)
    expected[..., : len(slots), :] = before[..., slots, :]
    np.testing.assert_array_equal(_content(cache, model.manifest), expected)


def _content(cache: Any, m: Manifest) -> Any:
    shape = (m.stages[1].layers, 2, m.model.kv_heads, m.max_context, m.model.head_dim)
    return gpu_standin.view(cache.memory.kv.address, shape, np.float32).copy()


# --- what goes from one conversation to the next --------------------------------------------------

ALLOCATIONS = ("cudaMalloc", "cudaHostAlloc", "cudaStreamBeginCapture", "cudaGraphInstantiate")


@pytest.mark.parametrize("grows", [False, True], ids=["in-place", "growing"])
def test_the_next_image_allocates_and_records_nothing(
    grows: bool, exported: Path, request: pytest.FixtureRequest, device: Gpu
) -> None:
    folder = request.getfixturevalue("grown") if grows else exported
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    counts, used = [], []
    for number in range(4):
        with ours.open([random_image(number)]) as mine, reference.open([random_image(number)]) as theirs:
            for question in QUESTIONS[:2]:
                got, want = (talk.ask(question, 3, Options(STEPS)) for talk in (mine, theirs))
                assert got.token_ids == want.token_ids
        gc.collect()
        counts.append([device.calls[name] for name in ALLOCATIONS])
        used.append(device.used)
    assert counts[1] == counts[0] or grows  # K/V of the image are set aside in new memory where caches grow
    assert len({tuple(after[1:]) for after in counts}) == 1
    assert len(set(used)) == 1


def test_a_conversation_starts_on_slots_that_hold_numbers(exported: Path, device: Gpu) -> None:
    model = open_model(exported)
    cache: Any = model.backend.stage(1, 16)
    kept = gpu_standin.view(cache.memory.kv.address, (cache.memory.kv.nbytes,), np.uint8)
    kept[...] = 0xFF  # NaN
    memory = cache.memory
    del cache
    again: Any = model.backend.stage(1, 16)
    assert again.memory is memory
    model.backend.cuda.wait()  # type: ignore[attr-defined]
    assert not kept.any()


def test_unused_memory_makes_room_for_what_does_not_fit_beside_it(grown: Path, device: Gpu) -> None:
    model = open_model(grown)
    small = model.backend.stage(0, 16)
    del small
    left = device.total - device.used
    device.total = device.used + left // 10**9  # nothing is free but the unused memory
    cache: Any = model.backend.stage(0, 15)
    del cache
    with pytest.raises(DeviceError, match="the KV cache of layers 1 to 1 needs"):
        model.backend.stage(0, 4000)


REFUSALS = ("cudaStreamBeginCapture", "execute", "cudaStreamEndCapture", "cudaGraphInstantiate")


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_cannot_be_recorded_is_queued_and_said_once(
    refused: str, exported: Path, device: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    device.refused = refused
    ours, reference = open_model(exported), load(exported, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for question in QUESTIONS:
            got, want = (talk.ask(question, 3, Options(8)) for talk in (mine, theirs))
            assert got.token_ids == want.token_ids
    stages = len(ours.manifest.stages)
    assert device.calls["cudaStreamBeginCapture"] <= 2 * stages  # once for each cache
    assert device.calls["cudaGraphLaunch"] == 0
    assert "cannot be recorded into a CUDA graph; its tokens are queued one by one" in caplog.text


def test_memory_that_is_freed_while_work_is_recorded_goes_right_after_it(exported: Path, device: Gpu) -> None:
    cuda = TensorrtBackend(Bundle.open(exported)).cuda
    held = [Buffer(cuda, 64, "a test"), Buffer(cuda, 64, "a test")]
    stays, goes = (each.address for each in held)

    def work() -> None:
        cuda.zero(held[0])
        held.pop()

    with cuda:
        graph = cuda.record(work)
    assert graph is not None
    assert stays in device.device
    assert goes not in device.device


def test_an_application_may_use_another_gpu(exported: Path, device: Gpu) -> None:
    ours, reference = open_model(exported), load(exported, device="cpu", threads=THREADS)
    device.current = 1
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for question in QUESTIONS[:2]:
            assert mine.ask(question, 3).token_ids == theirs.ask(question, 3).token_ids
            assert device.current == 1
    del ours, mine
    gc.collect()
    assert device.current == 1
    assert not device.device


@pytest.mark.parametrize("dialect", ["trt", "plain"])
def test_addresses_are_aligned_whatever_the_number_of_slots(
    dialect: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    export(tiny_checkpoint(Tiny(kv_heads=1)), folder, (2,), max_context=233)
    if dialect == "plain":
        build_all(folder, "jetson-orin", Release(TENSORRT, (10, 3)), "plain")
        monkeypatch.setattr(tensorrt, "find_gpu", lambda: ORIN)
    else:
        build_all(folder)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2):
            for question in QUESTIONS[:2]:
                assert mine.ask(question, k or "none").token_ids == theirs.ask(question, k or "none").token_ids


@pytest.mark.parametrize("grows", [False, True], ids=["in-place", "growing"])
def test_a_prompt_longer_than_the_profile_of_a_stage_runs_in_parts(
    grows: bool, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = copy(reducing, tmp_path / "bundle"), "sm89"
    if grows:
        target = "jetson-orin"
        build_all(folder, target, Release(TENSORRT, (10, 3)), "plain")
        monkeypatch.setattr(tensorrt, "find_gpu", lambda: ORIN)
    found = fingerprint.read_engines(Bundle.open(folder), target)
    engines = dict(found.engines)
    for graph in Bundle.open(folder).manifest.dialects[found.dialect].stages:
        profiles = tuple(
            {name: (low, 4, 4) if name == "tokens" and high > 4 else (low, likely, high)
             for name, (low, likely, high) in profile.items()}
            for profile in engines[graph].profiles
        )  # fmt: skip
        engines[graph] = replace(engines[graph], profiles=profiles)
    rewrite(folder, target, engines=engines)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    for word in ("none", "fastv:k=2", f"{DUAL},key=0", "dart:keep=8"):
        same_answers(ours, reference, word)


def test_a_failure_says_what_tensorrt_said(exported: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TensorrtBackend(Bundle.open(exported))

    def fails(context: Any, stream: int) -> bool:
        threads = [threading.Thread(target=context.engine.logger.log, args=(1, f"reason\n{i}")) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return False

    monkeypatch.setattr(gpu_standin.Context, "execute_async_v3", fails)
    with pytest.raises(
        DeviceError, match=r"cannot run embed\.trt\.engine: reason \d: reason \d: reason \d; run vtx-doctor"
    ):
        backend.embed(np.array([1, 2]))
    backend.cuda.wait()


def test_every_message_of_tensorrt_is_shown_on_demand(
    exported: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VTX_TENSORRT_LOG", "1")
    backend = TensorrtBackend(Bundle.open(exported))
    backend.engines.runtime.logger.log(4, "Loaded a kernel")
    assert "TensorRT: Loaded a kernel" in capsys.readouterr().err


# --- what does not fit ----------------------------------------------------------------------------


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    folder = copy(exported, tmp_path / "bundle")
    build_all(folder)
    return folder


def rewrite(folder: Path, target: str = "sm89", **changes: Any) -> None:
    found = fingerprint.read_engines(Bundle.open(folder), target)
    write_sealed(folder / f"engines/{target}/engines.json", replace(found, **changes).to_json().encode())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"version": "1.6.0"},
            r"built for TensorRT-RTX 1\.6\.0 and compute capability 8\.9; here is TensorRT-RTX 1\.7\.1",
        ),
        ({"capability": (12, 0)}, r"built for .* compute capability 12\.0; here is .* 8\.9 \(RTX 4090\)"),
    ],
    ids=["version", "card"],
)
def test_engines_of_another_machine_are_named_with_the_command_that_fixes_it(
    changes: dict[str, Any], said: str, bundle: Path, device: Gpu
) -> None:
    rewrite(bundle, **changes)
    with pytest.raises(DeviceError, match=said + rf".*vtx-build --bundle {bundle} --target this"):
        open_model(bundle)


def test_engines_of_a_flavour_that_is_not_installed_say_what_to_install(
    bundle: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, TENSORRT, None)
    rewrite(bundle, flavour=TENSORRT)
    with pytest.raises(DeviceError, match=r'TensorRT is not installed; pip install "vtx-edge\[tensorrt\]"'):
        TensorrtBackend(Bundle.open(bundle), gpu=CARD)


def test_a_bundle_without_engines_says_how_to_build_them(exported: Path, tmp_path: Path, device: Gpu) -> None:
    import shutil

    folder = copy(exported, tmp_path / "bundle")
    shutil.rmtree(folder / "engines")
    with pytest.raises(BundleError, match=rf"holds no engines; build them with: vtx-build --bundle {folder} --target"):
        open_model(folder)


def test_a_machine_without_a_gpu_says_so(bundle: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU answers here: its driver is not installed"):
        open_model(bundle)


def test_an_engine_cut_short_is_named(bundle: Path, device: Gpu) -> None:
    path = bundle / "engines/sm89/head.trt.engine"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BundleError, match=r"head\.trt\.engine holds .* bytes of .*, it is cut short; build them with"):
        open_model(bundle)


def test_an_engine_that_tensorrt_refuses_is_named_with_its_reason(bundle: Path, device: Gpu) -> None:
    path = bundle / "engines/sm89/head.trt.engine"
    path.write_bytes(b"not an engine")
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    record = replace(found.engines["head.trt.onnx"], bytes=13, sha256=_sha256(path))
    rewrite(bundle, engines={**found.engines, "head.trt.onnx": record})
    with pytest.raises(BundleError, match=r"does not take head\.trt\.engine: .*stdArchiveReader failed; build them"):
        open_model(bundle)


def test_ids_outside_the_vocabulary_reach_no_engine(exported: Path, device: Gpu) -> None:
    bundle = Bundle.open(exported)
    backend = TensorrtBackend(bundle)
    for wrong in (-1, bundle.manifest.model.vocab):
        with pytest.raises(BundleError, match=f"token {wrong} does not exist"):
            backend.embed(np.array([1, wrong]))


def _sha256(path: Path) -> str:
    from vtx.runtime.bundle.bundle import sha256

    return sha256(path)


def test_engines_of_another_bundle_are_named(bundle: Path, device: Gpu) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    graph = "embed.trt.onnx"
    record = replace(found.engines[graph], sources={**found.engines[graph].sources, graph: "0" * 64})
    rewrite(bundle, engines={**found.engines, graph: record})
    with pytest.raises(BundleError, match=r"was built from another embed\.trt\.onnx than this bundle's"):
        open_model(bundle)


def test_a_prompt_longer_than_the_profile_says_the_longest_that_fits(bundle: Path, device: Gpu) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    changed = {}
    for graph, record in found.engines.items():
        profiles = tuple({k: (1, 1, 7) if k == "tokens" else v for k, v in p.items()} for p in record.profiles)
        changed[graph] = replace(record, profiles=profiles)
    rewrite(bundle, engines=changed)
    model = open_model(bundle)
    with pytest.raises(ContextError, match=r"takes \d+ tokens at once, the engine of .* was built for at most 7"):
        greedy(model, prompt(model, prompt_messages(QUESTIONS[2]), [random_image(1)]), None, 1)


def test_too_little_device_memory_says_how_much_and_what_would_fit(bundle: Path, device: Gpu) -> None:
    manifest = Bundle.open(bundle).manifest
    caches = manifest.model.layers * manifest.max_context * manifest.kv_slot_bytes()
    device.total = caches // 2
    with pytest.raises(DeviceError, match=r"a context of \d+ slots .*is free; --max-context \d+ would fit"):
        open_model(bundle)
    device.total = 10
    with pytest.raises(DeviceError, match="even the engines do not fit"):
        open_model(bundle)


def test_memory_that_others_use_on_the_gpu_is_not_free(bundle: Path, device: Gpu) -> None:
    """A GPU that is large enough, but another program leaves less than the caches need."""
    manifest = Bundle.open(bundle).manifest
    caches = manifest.model.layers * manifest.max_context * manifest.kv_slot_bytes()
    device.total = 4 * caches
    device.device[1] = bytearray(device.total - caches // 2)
    with pytest.raises(DeviceError, match=rf"{size(caches // 2)} of {size(device.total)} of the device is free"):
        open_model(bundle)


def test_memory_that_runs_out_later_says_for_what(bundle: Path, device: Gpu) -> None:
    model = open_model(bundle)
    device.total = device.used
    with pytest.raises(DeviceError, match=r"the KV cache of layers 1 to 1 needs .* of device memory, 0 B? ?.*is free"):
        model.backend.stage(0, 16)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 1}', '{"format": true}', "{" * 100],
    ids=["empty", "list", "nothing", "half", "bool", "deep"],
)
def test_a_damaged_record_is_said_so(content: str, bundle: Path) -> None:
    write_sealed(bundle / "engines/sm89/engines.json", content.encode())
    with pytest.raises(BundleError, match=r"engines\.json"):
        fingerprint.read_engines(Bundle.open(bundle), "sm89")


def test_an_engine_outside_of_the_bundle_is_refused(bundle: Path) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    graph = "embed.trt.onnx"
    rewrite(bundle, engines={**found.engines, graph: replace(found.engines[graph], file="../../../x")})
    with pytest.raises(BundleError, match="leaves the bundle"):
        fingerprint.read_engines(Bundle.open(bundle), "sm89")
    outside = bundle.parent / "outside"
    outside.write_bytes(b"x")
    path = bundle / "engines/sm89" / found.engines[graph].file
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(BundleError, match="is a link that leaves the bundle"):
        fingerprint.open_engine(Bundle.open(bundle), found, found.engines[graph])


# --- the stand-in itself --------------------------------------------------------------------------


def test_the_stand_in_sees_a_second_binding_and_memory_that_is_gone(exported: Path, device: Gpu) -> None:
    backend = TensorrtBackend(Bundle.open(exported))
    backend.embed(np.array([1, 2]))
    engines = backend.engines
    context = engines.context("embed.trt.onnx", 0).execution
    with pytest.raises(AssertionError, match="hidden is bound twice"):
        context.set_tensor_address("hidden", engines.address("hidden"))
    device.cudaFree(engines.address("hidden"))
    with pytest.raises(AssertionError, match="are not device memory"):
        backend.cuda.copy_out(np.zeros(1, np.float32), engines.address("hidden"))
    engines.buffers["hidden"].free.detach()


# --- the choice of the device ---------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["tensorrt", "auto"])
def test_a_bundle_with_engines_for_this_machine_is_answered_there(
    asked: str, exported: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.host.gpu.find_gpu", lambda: CARD)
    model = load(exported, device=asked, threads=THREADS)
    assert (model.backend.device, model.backend.compute) == ("tensorrt", "f32")
    with model.open([random_image(1)]) as image:
        assert image.ask(QUESTIONS[0]).stats.device == "tensorrt"


def test_engines_are_compared_with_onnxruntime_graph_by_graph(
    reducing: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.host.gpu.find_gpu", lambda: CARD)
    graphs = list(compare(Bundle.open(reducing), "ort", "tensorrt"))
    assert first_difference(graphs) is None
    stages = Bundle.open(reducing).manifest.dialects["trt"].stages
    assert {"vision.trt.onnx", "embed.trt.onnx", *stages, "head.trt.onnx"} < {graph.graph for graph in graphs}
    assert max(graph.worst.difference for graph in graphs) > 0


def test_engines_that_do_not_fit_are_told_of_when_asked_for_and_passed_over_otherwise(
    exported: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU answers here"):
        load(exported, device="tensorrt", threads=THREADS)
    model = load(exported, threads=THREADS)
    assert model.backend.device == "cpu"
    assert "no NVIDIA GPU answers here" in model.loaded.why


def test_where_nothing_is_installed_the_package_is_named_that_answers_here(
    exported: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages for engines help where there is a GPU, and nowhere else."""
    bundle = Bundle.open(exported)
    monkeypatch.setattr("vtx.runtime.backends.devices.find_spec", lambda _: None)
    monkeypatch.setattr("vtx.runtime.host.gpu.find_gpu", lambda: None)
    with pytest.raises(DeviceError, match=r'onnxruntime is not installed; pip install "vtx-edge\[cpu\]"') as refused:
        choose(bundle)
    assert "rtx" not in str(refused.value)
    assert "there is none here" in str(refused.value)
    monkeypatch.setattr("vtx.runtime.host.gpu.find_gpu", lambda: CARD)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[rtx\]"'):
        choose(bundle)
