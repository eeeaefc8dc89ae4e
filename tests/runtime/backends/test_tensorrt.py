"""The TensorRT backend over stand-ins that watch every call: the numbers, the memory, and what does not fit."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_standin
from tests.support.bundles import copy, export
from tests.support.engines import DUAL, ORIN, open_model, shorten
from tests.support.exported import QUESTIONS, THREADS, greedy, policy, prompt
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.gpu_standin import Gpu, build_all
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.cuda import Buffer, Cuda, MemoryPool
from vtx.runtime.backends.device_states import StatesPool
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.backends.tensorrt.loaded import LoadedEngines, TensorrtCacheContext
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.host import gpu
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.bench.stopwatch import timed
from vtx.tools.tensorrt.releases import TENSORRT, Release

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
JETPACK_6 = Release(TENSORRT, (10, 3))
STEPS = 6
FRAMES = int(os.environ.get("VTX_TEST_FRAMES", "30"))


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 2, 3])
def test_answers_are_those_of_onnxruntime(k: int | None, with_engines: Path, device: Gpu) -> None:
    ours, reference = open_model(with_engines), load(with_engines, device="cpu", threads=THREADS)
    for number, question in enumerate(QUESTIONS):
        images = [random_image(number)]
        want = greedy(reference, prompt(reference, prompt_messages(question), images), k, STEPS)
        got = greedy(ours, prompt(ours, prompt_messages(question), images), k, STEPS)
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("tiny", [QWEN2, QWEN25, QWEN3], ids=lambda tiny: tiny.family)
def test_images_at_their_own_resolution_are_answered_as_on_onnxruntime(
    tiny: Tiny,
    dialect: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    device: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "bundle"
    export(tiny_checkpoint(tiny), folder, (2,))
    if dialect == "trt10":
        build_all(folder, "jetson-orin", JETPACK_6, dialect)
        monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    else:
        build_all(folder)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    for number, (width, height) in enumerate([(40, 40), (200, 130), (90, 150), (300, 160)]):
        images, k = [random_image(number).resize((width, height))], (None, 2)[number % 2]
        want, got = (greedy(m, prompt(m, prompt_messages("red?"), images), k, STEPS) for m in (reference, ours))
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)
    with (
        ours.open([random_image(5).resize((300, 30))]) as image,
        pytest.raises(DeviceError, match=r"and this engine takes .* a side; use a smaller --max-pixels, --device"),
    ):
        image.ask("red?", "none")


def same_answers(ours: Model, reference: Model, word: str) -> None:
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2, 3):
            for question in QUESTIONS:
                got, want = (talk.ask(question, k, Options(STEPS), reduce=word) for talk in (mine, theirs))
                assert got.token_ids == want.token_ids
                assert got.stats.reduced == want.stats.reduced
                assert got.stats.kv_slots == want.stats.kv_slots


@pytest.mark.sampled(3)
@pytest.mark.parametrize("word", WORDS)
def test_reductions_keep_and_answer_as_on_onnxruntime(word: str, reducing: Path, device: Gpu) -> None:
    same_answers(open_model(reducing), load(reducing, device="cpu", threads=THREADS), word)


def test_a_profile_for_decoding_and_one_for_prompts_answer_the_same(
    with_engines: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    build_all(folder, "jetson-thor", Release(TENSORRT, (10, 16)))
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: gpu.Gpu("Thor", (11, 0), 1 << 37, (13, 0)))
    ours, reference = open_model(folder), load(with_engines, device="cpu", threads=THREADS)
    assert {len(r.profiles) for g, r in ours.backend.engine_set.engines.items() if g.startswith("stage")} == {2}
    images, messages = [random_image(3)], prompt_messages(QUESTIONS[1])
    want, got = (greedy(m, prompt(m, messages, images), 3, STEPS) for m in (reference, ours))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.parametrize("k", [None, 2, 3])
def test_engines_of_jetpack_6_answer_the_same(k: int | None, on_jetpack_6: Path) -> None:
    ours, reference = open_model(on_jetpack_6), load(on_jetpack_6, device="cpu", threads=THREADS)
    for number, question in enumerate(QUESTIONS):
        images, messages = [random_image(number)], prompt_messages(question)
        want, got = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (reference, ours))
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("word", WORDS)
def test_reductions_work_on_jetpack_6(
    word: str, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(reducing, tmp_path / "jetpack-6")
    build_all(folder, "jetson-orin", JETPACK_6, "trt10")
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    same_answers(open_model(folder), load(folder, device="cpu", threads=THREADS), word)


@pytest.mark.parametrize("query", [False, True])
def test_one_token_takes_the_profile_of_one(
    query: bool, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a question of one token does; the other profile of the engine begins at two."""
    folder = copy(reducing, tmp_path / "jetpack-6")
    build_all(folder, "jetson-orin", JETPACK_6, "trt10")
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    rows = np.random.default_rng(0).standard_normal((5, ours.manifest.model.hidden)).astype(np.float32)
    number = next(n for n, stage in enumerate(ours.manifest.stages) if stage.query)
    found = []
    for model in (ours, reference):
        cache = model.backend.stage(number, 16)
        cache.append(TokenStates(rows[:4]), np.arange(4))
        last = np.array(cache.append(TokenStates(rows[4:]), np.arange(4, 5), query=query))
        found.append([last, cache.keys(), *(np.array(each) for each in (cache.attention() if query else ()))])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.slow
def test_one_conversation_goes_on_with_what_it_has(with_engines: Path, device: Gpu) -> None:
    ours, reference = open_model(with_engines), load(with_engines, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k, most in (("none", 20), (2, 20), (3, 20), ("none", 256), (2, 20)):
            for question in QUESTIONS:
                ours_ids, ids = (talk.ask(question, k, max_new_tokens=most).token_ids for talk in (mine, theirs))
                assert ours_ids == ids


def test_decoding_is_recorded_once_and_launched_from_then_on(on_jetpack_6: Path, device: Gpu) -> None:
    model = open_model(on_jetpack_6)
    asked = prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)])
    greedy(model, asked, None, 10)
    assert device.calls["cudaStreamBeginCapture"] == 1
    assert device.calls["cudaGraphLaunch"] == 9 - 1  # all steps but the first


@pytest.mark.parametrize("jetpack", [None, 6])
def test_a_greedy_token_is_chosen_on_the_device_with_one_wait(
    jetpack: int | None, with_engines: Path, request: pytest.FixtureRequest, device: Gpu
) -> None:
    folder = request.getfixturevalue("on_jetpack_6") if jetpack else with_engines
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    counts = []
    for options in (Options(STEPS), Options(STEPS), Options(STEPS + 3), Options(STEPS, logprobs=True)):
        with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
            for chat in (mine, theirs):  # what follows runs over memory that has been recorded
                chat.ask(QUESTIONS[1], 3, Options(3, ignore_eos=True))
            device.calls.clear()
            got, want = (chat.ask(QUESTIONS[0], 3, replace(options, ignore_eos=True)) for chat in (mine, theirs))
        assert got.token_ids == want.token_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        counts.append(device.calls.copy())
    _, few, more, with_logits = counts  # the first takes memory that the others take again
    stages = len(ours.manifest.stages)
    launches = {"captured enqueue": 3 * (stages + 2)} if jetpack is None else {"cudaGraphLaunch": 3}
    more.subtract(few)
    further = {name: n for name, n in more.items() if n and name not in ("cudaGetDevice", "cudaMemcpyAsync", "enqueue")}
    # K and V of each stage, and without a recording of its own each stage's state, go to the next place on the device
    copies = 3 * (stages if jetpack else 2 * stages)
    assert further == {**launches, "cudaMemcpy2DAsync": copies, "cudaStreamSynchronize": 3}
    assert with_logits["cudaMemcpyAsync"] == few["cudaMemcpyAsync"] + STEPS - 1  # the logits of each step


def test_logits_that_are_not_finite_are_an_error_and_the_next_question_is_answered(
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(with_engines)
    with model.open([random_image(1)]) as image:
        want = image.ask(QUESTIONS[0], 3, Options(STEPS))
        ran = gpu_standin.Context.run

        def poisoned(context: Any, shapes: Any, addresses: dict[str, int]) -> None:
            if "logits" in addresses and shapes["hidden"][0] == 1 and device.calls["captured enqueue"]:
                gpu_standin.view(addresses["hidden"], shapes["hidden"], np.float32)[...] = np.nan
            ran(context, shapes, addresses)

        with monkeypatch.context() as patch:
            patch.setattr(gpu_standin.Context, "run", poisoned)
            with pytest.raises(BundleError, match="the logits of this answer are not finite numbers; export with"):
                image.ask(QUESTIONS[1], 3, Options(STEPS, ignore_eos=True))
        assert image.ask(QUESTIONS[0], 3, Options(STEPS)).token_ids == want.token_ids


def test_a_timed_backend_lists_the_work_of_each_token(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    backend, calls = timed(model.backend)
    session = Session(backend, model.manifest)
    logits = session.prefill(prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), policy(3)).logits
    calls.clear()
    token = session.choose(int(logits.argmax()))
    assert token is not None
    stages = len(model.manifest.stages)
    assert [(call.name, call.stage, call.tokens) for call in calls] == [
        *(("append", number, 1) for number in range(stages)),
        ("head", None, 0),
    ]
    assert [call.filled for call in calls[:-1]] == [cache.length - 1 for cache in session.decoding_caches]


def test_tensorrt_rtx_records_tokens_by_itself(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    greedy(model, prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), None, 10)
    assert device.calls["cudaStreamBeginCapture"] == 0
    assert device.calls["captured enqueue"] == (2 + len(model.manifest.stages)) * 9  # the embedding and the head too


def test_tensorrt_rtx_compiles_its_kernels_once_for_a_card(
    with_engines: Path, tmp_path: Path, device: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    kernels = folder / "engines/sm89" / fingerprint.KERNELS

    kernels.unlink(missing_ok=True)  # of other tests

    def compiled() -> int:
        device.calls.clear()
        with load(folder, device="tensorrt") as model, model.open([random_image(1)]) as image:
            image.ask("red?", 2, reduce="none", max_new_tokens=4)
        return device.calls["compile"]

    first = compiled()
    assert first > 4
    content = kernels.read_bytes()
    assert compiled() == 0
    assert kernels.read_bytes() == content
    kernels.write_bytes(content.replace(b'"card": 0', b'"card": 1'))  # of another card
    assert compiled() == first
    assert kernels.read_bytes() == content
    kernels.write_bytes(b"damaged")
    assert compiled() == first
    assert not [path for path in kernels.parent.iterdir() if path.name.startswith(".")]
    caplog.set_level("INFO")
    kernels.unlink()
    kernels.mkdir()  # as a folder that cannot be written
    assert compiled() == first
    assert "compiled kernels are not kept" in caplog.text


def test_kernels_are_not_taken_from_an_unsigned_file_where_a_signature_is_required(
    with_engines: Path, tmp_path: Path, device: Gpu
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    kernels = folder / "engines/sm89" / fingerprint.KERNELS
    kernels.write_bytes(b"not signed")
    key: Any = object()
    opened, cuda = Bundle.open(folder), Cuda(device)
    engines = fingerprint.read_engines(opened, "sm89")
    LoadedEngines(replace(opened, key=key), engines, gpu_standin.module(device), cuda).close()
    assert kernels.read_bytes() == b"not signed"


def test_no_memory_is_taken_while_decoding(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    asked = prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)])
    greedy(model, asked, None, 3)
    rows = np.zeros((1, model.manifest.model.hidden), np.float32)
    held, cache = model.backend.stage(0, 16), model.backend.stage(0, 16)
    held.append(TokenStates(rows), np.zeros(1, np.int64))  # the memory of the answer
    before, counts = device.calls["cudaMalloc"], []
    for position in range(8):
        cache.append(TokenStates(rows), np.array([position]))
        counts.append([device.calls[call] for call in ("cudaMalloc", "cudaHostAlloc")])
    assert counts[0][0] == before + 1  # the cache itself, one buffer
    assert counts == counts[:1] * 8


def test_everything_is_given_back(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    greedy(model, prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), 2, 3)
    assert device.device
    del model
    gc.collect()
    assert not device.device
    assert not device.host
    assert not any(device.graphs.values())


@pytest.mark.parametrize("slots", [[], [0], [0, 1, 2], [1, 3, 4, 8], list(range(9))])
def test_saved_slots_come_back_where_they_are_put(slots: list[int], with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
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
    shape = (m.stages[1].layers, 2, cache.memory.capacity, m.model.kv_heads, m.model.head_dim)
    return gpu_standin.view(cache.memory.kv.address, shape, np.float32).swapaxes(2, 3).copy()


# --- what goes from one conversation to the next --------------------------------------------------

ALLOCATIONS = (
    "cudaMalloc", "cudaHostAlloc", "createExecutionContext", "cudaStreamBeginCapture", "cudaGraphInstantiate",
)  # fmt: skip


@pytest.mark.parametrize("jetpack", [None, 6])
def test_the_next_image_allocates_and_records_nothing(
    jetpack: int | None, with_engines: Path, request: pytest.FixtureRequest, device: Gpu
) -> None:
    folder = request.getfixturevalue("on_jetpack_6") if jetpack else with_engines
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
    assert len({tuple(after) for after in counts}) == 1
    assert len(set(used)) == 1


def test_an_application_that_asks_about_frames_holds_no_more_after_the_first(with_engines: Path, device: Gpu) -> None:
    model, stages = open_model(with_engines), 3
    seen: list[tuple[Counter[str], int]] = []
    for frame in range(FRAMES):
        before = device.calls.copy()
        with model.open([random_image(frame)]) as image:
            for question in QUESTIONS[:2]:
                image.ask(question, 3, Options(STEPS, ignore_eos=True))
        seen.append((device.calls - before, device.used))
    first, *others = (calls for calls, _ in seen)
    assert first["cudaMalloc"] >= 2 * stages
    assert not any(calls[name] for calls in others for name in ALLOCATIONS)
    assert len({used for _, used in seen}) == 1
    assert len({calls["cudaStreamSynchronize"] for calls in others}) == 1


def test_a_conversation_starts_on_slots_that_hold_numbers(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    cache: Any = model.backend.stage(1, 16)
    rows = TokenStates(np.zeros((1, model.manifest.model.hidden), np.float32))
    cache.append(rows, np.zeros(1, np.int64))
    kept = gpu_standin.view(cache.memory.kv.address, (cache.memory.kv.nbytes,), np.uint8)
    kept[...] = 0xFF  # NaN
    memory = cache.memory
    del cache
    again: Any = model.backend.stage(1, 16)
    again.append(rows, np.zeros(1, np.int64))
    assert again.memory is memory
    assert np.isfinite(kept.view(np.float32)).all()


def test_unused_memory_makes_room_for_what_does_not_fit_beside_it(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    rows = np.zeros((40, model.manifest.model.hidden), np.float32)
    cache: Any = model.backend.stage(0, 80)
    cache.append(TokenStates(rows), np.arange(40))
    del cache
    device.total = device.used + 2 * gpu_standin.CONTEXT  # nothing else is free but the unused memory
    cache, other = model.backend.stage(0, 80), model.backend.stage(1, 80)
    other.append(TokenStates(rows[:20]), np.arange(20))
    with pytest.raises(DeviceError, match=r"(the KV cache of layers 1 to 1|hidden states of 64 tokens) needs"):
        cache.append(TokenStates(rows), np.arange(40))
    assert cache.length == 0
    del other
    cache.append(TokenStates(rows), np.arange(40))


def test_a_cache_that_cannot_grow_stays_as_it_is(with_engines: Path, device: Gpu) -> None:
    ours, reference = open_model(with_engines), load(with_engines, device="cpu", threads=THREADS)
    rows = np.random.default_rng(0).standard_normal((40, ours.manifest.model.hidden)).astype(np.float32)
    mine, theirs = (model.backend.stage(1, 80) for model in (ours, reference))
    for cache in (mine, theirs):
        cache.append(TokenStates(rows[:31]), np.arange(31))
    device.total, total = device.used, device.total
    with pytest.raises(DeviceError, match="the KV cache of layers 2 to 2 needs"):
        mine.append(TokenStates(rows[31:]), np.arange(31, 40))
    device.total = total
    out = [cache.append(TokenStates(rows[31:]), np.arange(31, 40)) for cache in (mine, theirs)]
    np.testing.assert_allclose(*out, atol=1e-4)
    assert (mine.length, mine.resident) == (40, 64)


class Ledger(Gpu):
    """Counts memory, and has none."""

    def cudaMalloc(self, nbytes: int) -> Any:
        self.next += 1 << 40
        self.sizes[self.next] = nbytes
        return gpu_standin.Error.cudaSuccess, self.next

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.next = 0

    def cudaFree(self, address: int) -> Any:
        del self.sizes[address]
        return (gpu_standin.Error.cudaSuccess,)

    def holds(self, address: int, nbytes: int) -> None: ...

    def queue(self, work: Any) -> None: ...


@pytest.mark.parametrize(("k", "slots"), [(None, 32 * 736), (17, 16 * 736 + 16 * 160), (9, 8 * 736 + 24 * 160)])
def test_tokens_that_have_left_take_no_memory_behind_the_cut(k: int | None, slots: int) -> None:
    """LLaVA-1.5-7B in float16: 576 image tokens, 65 of text, an answer of 64, in steps of 32 slots."""
    device = Ledger()
    cuda = Cuda(device)
    runs = SimpleNamespace(bind=lambda *_: None, enqueue=lambda *_: None, records=False)
    engines: Any = SimpleNamespace(
        address=lambda _: 0, longest=lambda _: 1024, new_context=lambda *_, **__: runs, context=lambda *_: runs,
        check_tokens=lambda *_: None,
    )  # fmt: skip
    model: Any = SimpleNamespace(
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        heads_of=lambda _: 128,
        sliding=None,
        two_way=None,
        state_numbers=0,
    )
    states = StatesPool(cuda, 4096, MemoryPool(cuda))
    shared = TensorrtCacheContext(engines, cuda, model, np.dtype(np.float16), 4096, {}, None, states)
    held, layers = [], [8, 8, 16]
    for first, last, seen in ((1, 8, True), (9, 16, k != 9), (17, 32, k is None)):
        spec: Any = SimpleNamespace(
            first=first,
            last=last,
            cached=tuple(range(first, last + 1)),
            query=False,
            inputs=(),
            stateful=(),
            keeps=True,
        )
        cache = TensorrtStageCache(shared, spec, "", 4096)
        for tokens in [(576 if seen else 0) + 65] + 64 * [1]:
            cache.append(TokenStates(np.zeros((tokens, 4096), np.float32)), np.arange(tokens))
        held.append(cache)
    shared.pool.unused.clear()  # hidden states, which nothing holds
    assert sum(device.sizes.values()) == slots * 2 * 32 * 128 * 2
    assert sum(cache.resident * count for cache, count in zip(held, layers, strict=True)) == slots


REFUSALS = ("cudaStreamBeginCapture", "execute", "cudaStreamEndCapture", "cudaGraphInstantiate")


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_cannot_be_recorded_is_queued_and_said_once(
    refused: str, on_jetpack_6: Path, device: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    device.refused = refused
    ours, reference = open_model(on_jetpack_6), load(on_jetpack_6, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for question in QUESTIONS:
            got, want = (talk.ask(question, 3, Options(8)) for talk in (mine, theirs))
            assert got.token_ids == want.token_ids
    assert device.calls["cudaStreamBeginCapture"] <= 1
    assert device.calls["cudaGraphLaunch"] == 0
    assert caplog.text.count("cannot be recorded into a CUDA graph; its tokens are queued one by one") == 1


def test_memory_that_is_freed_while_work_is_recorded_goes_right_after_it(with_engines: Path, device: Gpu) -> None:
    cuda = TensorrtBackend(Bundle.open(with_engines)).cuda
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


def test_an_application_may_use_another_gpu(with_engines: Path, device: Gpu) -> None:
    ours, reference = open_model(with_engines), load(with_engines, device="cpu", threads=THREADS)
    device.current = 1
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for question in QUESTIONS[:2]:
            assert mine.ask(question, 3).token_ids == theirs.ask(question, 3).token_ids
            assert device.current == 1
    del ours, mine
    gc.collect()
    assert device.current == 1
    assert not device.device


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
def test_addresses_are_aligned_whatever_the_number_of_slots(
    dialect: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    export(tiny_checkpoint(Tiny(kv_heads=1)), folder, (2,), max_context=233)
    if dialect == "trt10":
        build_all(folder, "jetson-orin", JETPACK_6, dialect)
        monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    else:
        build_all(folder)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2):
            for question in QUESTIONS[:2]:
                assert mine.ask(question, k or "none").token_ids == theirs.ask(question, k or "none").token_ids


@pytest.mark.parametrize("jetpack", [None, 6])
def test_a_prompt_longer_than_the_profile_of_a_stage_runs_in_parts(
    jetpack: int | None, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = copy(reducing, tmp_path / "bundle"), "sm89"
    if jetpack:
        target = "jetson-orin"
        build_all(folder, target, JETPACK_6, "trt10")
        monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    shorten(folder, target, 4)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    for word in ("none", "fastv:k=2", f"{DUAL},key=0", "dart:keep=8"):
        same_answers(ours, reference, word)


def test_a_failure_says_what_tensorrt_said(with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TensorrtBackend(Bundle.open(with_engines))

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
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VTX_TENSORRT_LOG", "1")
    backend = TensorrtBackend(Bundle.open(with_engines))
    backend.engines.runtime.logger.log(4, "Loaded a kernel")
    assert "TensorRT: Loaded a kernel" in capsys.readouterr().err
