"""The TensorRT backend's memory of a GPU: what it takes, holds and gives back."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_standin
from tests.support.engines import open_model
from tests.support.exported import QUESTIONS, THREADS, greedy, prompt
from tests.support.gpu_standin import Gpu
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.backends.cuda import Cuda, MemoryPool
from vtx.runtime.backends.device_states import StatesPool
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.errors import DeviceError
from vtx.runtime.vision.tokens import TokenStates

STEPS = 6
ALLOCATIONS = (
    "cuMemAlloc_v2", "cuMemHostAlloc", "createExecutionContext", "cuStreamBeginCapture_v2",
    "cuGraphInstantiateWithFlags",
)  # fmt: skip


def test_no_memory_is_taken_while_decoding(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    asked = prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)])
    greedy(model, asked, None, 3)
    rows = np.zeros((1, model.manifest.model.hidden), np.float32)
    held, cache = model.backend.stage(0, 16), model.backend.stage(0, 16)
    held.append(TokenStates(rows), np.zeros(1, np.int64))  # the memory of the answer
    before, counts = device.calls["cuMemAlloc_v2"], []
    for position in range(8):
        cache.append(TokenStates(rows), np.array([position]))
        counts.append([device.calls[call] for call in ("cuMemAlloc_v2", "cuMemHostAlloc")])
    assert counts[0][0] == before + 1  # the cache itself, one buffer
    assert counts == counts[:1] * 8


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


def test_everything_is_given_back(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    greedy(model, prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), 2, 3)
    assert device.device
    del model
    gc.collect()
    assert not device.device
    assert not device.host
    assert not any(device.graphs.values())


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


@dataclass
class Slots:
    """Memory of a stage, without any."""

    capacity: int

    def clear(self) -> None: ...


@pytest.mark.parametrize(("capacity", "taken"), [(512, 512), (2048, 4096), (4096, 4096), (2047, 2047)])
def test_a_short_conversation_does_not_take_the_memory_of_a_long_one(capacity: int, taken: int) -> None:
    """A token reads all slots, so memory that is lent has at most twice those that are asked for."""
    pool = MemoryPool(Cuda(Gpu()))
    pool.give_back("stage", Slots(4096))
    assert pool.borrow("stage", capacity, Slots).capacity == taken


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

    def cuMemAlloc_v2(self, nbytes: int) -> Any:
        self.next += 1 << 40
        self.sizes[self.next] = nbytes
        return gpu_standin.Error.CUDA_SUCCESS, self.next

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.next = 0

    def cuMemFree_v2(self, address: int) -> Any:
        del self.sizes[address]
        return (gpu_standin.Error.CUDA_SUCCESS,)

    def holds(self, address: int, nbytes: int) -> None: ...

    def queue(self, work: Any) -> None: ...


@pytest.mark.sampled
@pytest.mark.parametrize(("k", "slots"), [(None, 32 * 768), (17, 16 * 768 + 16 * 256), (9, 8 * 768 + 24 * 256)])
def test_tokens_that_have_left_take_no_memory_behind_the_cut(k: int | None, slots: int) -> None:
    """LLaVA-1.5-7B in float16: 576 image tokens, 65 of text, an answer of 64, in steps of 256 slots."""
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
