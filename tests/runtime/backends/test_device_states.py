"""Hidden states stay on the GPU between stages: the copies of prompts and drafts, on stand-ins."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.engines import open_model
from tests.support.exported import THREADS, policy, prompt
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import Gpu, build_all
from tests.support.ort_standin import Ort
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.cuda import Buffer, Cuda, MemoryPool
from vtx.runtime.backends.device_states import StatesPool
from vtx.runtime.backends.ort.cuda import OrtCudaBackend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates

QUESTION = "How many circle shapes are there?"
WIDTH = 64


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with four stages, for both backends."""
    options = ExportOptions(
        str(tiny_checkpoint(Tiny(layers=4))), (2, 3), "fp32", kv_precision="fp16", reductions=("fastv:k=1", "dart:k=1"),
        dialects=("ort", "ort-cuda", "trt"),
    )  # fmt: skip
    made = export_with(options, tmp_path_factory.mktemp("states") / "bundle").folder
    build_all(made)
    return made


@pytest.fixture(params=["tensorrt", "cuda"])
def opened(request: pytest.FixtureRequest, folder: Path) -> tuple[Model, Gpu]:
    """The bundle on one of the stand-ins."""
    if request.param == "tensorrt":
        device: Gpu = request.getfixturevalue("device")
        return open_model(folder), device
    machine: Ort = request.getfixturevalue("machine")
    bundle = Bundle.open(folder)
    return Model(bundle, OrtCudaBackend(bundle, THREADS), 0.0, ""), machine.gpu


def copies(device: Gpu, side: str) -> Counter[int]:
    """The number of copies "in" or "out", by their bytes."""
    return Counter(nbytes for way, nbytes in device.copies if way == side)


def launches(device: Gpu) -> int:
    """Runs of engines, or of onnxruntime's graphs."""
    return sum(device.calls[name] for name in ("enqueue", "run", "run on arrays"))


@pytest.mark.parametrize("k", [None, 2, 3])
def test_a_prompt_copies_its_embeddings_in_and_its_logits_out(k: int | None, opened: tuple[Model, Gpu]) -> None:
    model, device = opened
    asked, m = prompt(model, prompt_messages(QUESTION), [random_image(1)]), model.manifest
    session, row = Session(model.backend, m), 4 * m.model.hidden
    session.prefill(prompt(model, prompt_messages("red?"), [random_image(0)]), policy(k))  # loads what it needs
    images = [encode() for _, encode in asked.encoders]
    first, whole = asked.prefix_length, len(asked.ids)
    rest, image = whole - first, sum(map(len, images))
    lacking = whole - int(np.argmax(asked.is_vision))  # both prompts begin with the same text, which the caches hold
    assert lacking < whole
    device.copies.clear()
    session.prefill(asked, policy(k))
    assert copies(device, "out") == Counter([row * first, row * image, row * rest, 4 * m.model.vocab])
    assert copies(device, "in")[row * lacking] == 1  # into the first stage
    small = Counter({nbytes: n for nbytes, n in copies(device, "in").items() if nbytes < row * lacking})
    assert max(small) == 8 * lacking  # its positions; the picture is larger than its states
    other = prompt(model, prompt_messages("Is it red?"), [random_image(1)])
    device.copies.clear()
    before = launches(device)
    session.prefill(other, policy(k))
    rest = len(other.ids) - first
    assert copies(device, "out") == Counter([row * rest, 4 * m.model.vocab])
    assert copies(device, "in")[row * rest] == 1
    assert launches(device) - before == 1 + len(m.stages) + 1  # the embedding and the head, once each


def test_a_draft_copies_its_embeddings_in_and_its_logits_out(folder: Path, opened: tuple[Model, Gpu]) -> None:
    model, device = opened
    m, reference = model.manifest, load(folder, device="cpu", threads=THREADS)
    found = []
    for each in (model, reference):
        session = Session(each.backend, m)
        session.prefill(prompt(each, prompt_messages(QUESTION), [random_image(1)]), policy(3))
        device.copies.clear()
        logits = [session.decode(5, [6, 7, 8])]
        copied = copies(device, "out")
        while len(logits) < 4:
            after = session.accept(5 + len(logits))
            assert after is not None
            logits.append(after)
        found.append((np.stack(logits), session.state))
        if each is model:
            assert copied == Counter([4 * 4 * m.model.hidden, 4 * 4 * m.model.vocab])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())


def test_a_policy_gets_the_states_that_it_asks_for(opened: tuple[Model, Gpu]) -> None:
    """DART reads states of the question and of the image, FastV only attention."""
    model, device = opened
    row, copied = 4 * model.manifest.model.hidden, dict[str, int]()
    with model.open([random_image(1)]) as image:
        image.ask(QUESTION, "none", reduce="none", max_new_tokens=1)
        for word in ("fastv:k=1", "dart:k=1"):
            device.copies.clear()
            answer = image.ask(QUESTION, "none", reduce=word, max_new_tokens=1)
            tokens = answer.stats.vision_tokens
            copied[word] = copies(device, "out")[row * tokens]
    assert copied == {"fastv:k=1": 0, "dart:k=1": 1}


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def pool(gpu: Gpu) -> StatesPool:
    cuda = Cuda(gpu)
    return StatesPool(cuda, WIDTH, MemoryPool(cuda))


@pytest.mark.slow
def test_states_of_a_device_behave_as_arrays(pool: StatesPool) -> None:
    array = np.random.default_rng(0).standard_normal((70, WIDTH)).astype(np.float32)
    states: Any = pool.joined([array[:50], array[50:]])
    mask, ids = array[:, 0] > 0, np.array([3, 69, 4, 5, 0])
    for which in (slice(None), slice(5, 9), slice(-1, None), slice(9, 2), mask, ids, -1, 7, np.arange(0)):
        np.testing.assert_array_equal(np.asarray(states[which]), array[which])
        assert states[which].shape == array[which].shape
    parts = (states[:3], array[:4], states[mask], array[:0])
    joined = np.concatenate(parts)
    np.testing.assert_array_equal(joined, np.concatenate([array[:3], array[:4], array[mask], array[:0]]))
    assert np.asarray(states[ids]).dtype == np.float32
    view, copy = states[2:6], states[2:6].copy()
    del states
    gc.collect()
    other: Any = pool.joined([np.zeros((70, WIDTH), np.float32)])
    np.testing.assert_array_equal(view, array[2:6])  # a view holds its memory
    np.testing.assert_array_equal(copy, array[2:6])
    assert not np.asarray(other).any()
    with pytest.raises(IndexError, match="token 70 of 70"):
        other[70]
    with pytest.raises(ValueError, match="can only be copied to the host"):
        np.array(other, copy=False)
    with pytest.raises(TypeError, match="no implementation found"):
        np.stack([other, other])


def test_memory_that_is_dropped_while_work_is_queued_is_freed_after_that_work(opened: tuple[Model, Gpu]) -> None:
    """A session and what it saved, which only the collector frees, and states that are copied at that moment."""
    model, device = opened
    m, array = model.manifest, np.random.default_rng(0).standard_normal((40, model.manifest.model.hidden))
    session = Session(model.backend, m)
    session.prefill(prompt(model, prompt_messages(QUESTION), [random_image(1)]), policy(3))
    cache: Any = session.caches.cache(0)
    saved: Any = cache.read(np.arange(5))
    states = cache.append(TokenStates(array.astype(np.float32)), np.arange(90, 130))
    address = saved.buffer.address
    loop = [saved, session]
    loop.append(loop)
    gathered = states[np.arange(0, 40, 3)]
    assert device.busy
    del session, cache, saved, loop
    gc.collect()
    assert device.busy, "nothing waits in a finalizer"
    assert address in device.device
    np.testing.assert_array_equal(gathered, np.asarray(states)[::3])
    assert address not in device.device


@pytest.mark.slow
def test_what_was_released_while_work_was_queued_is_freed_for_new_memory_and_at_the_end(gpu: Gpu) -> None:
    gpu.total = 4000
    cuda = Cuda(gpu)
    with cuda:
        first, second = (Buffer(cuda, 1500, "one half") for _ in range(2))
        cuda.zero(second)
        del first
        assert gpu.used == 3000
        third = Buffer(cuda, 2000, "more than is left")
        assert gpu.used == 3500
        cuda.zero(third)
    del second, third
    assert gpu.busy
    assert gpu.used == 3500
    del cuda
    gc.collect()
    assert gpu.used == 0


@pytest.mark.slow
def test_memory_of_states_is_used_again(pool: StatesPool, gpu: Gpu) -> None:
    for _ in range(5):
        held = pool.empty(40)
        gathered = held[np.arange(0, 40, 2)]
        del held, gathered
        gc.collect()
    assert gpu.calls["cuMemAlloc_v2"] == 2
    pool.cuda.wait()
    pool.memory.unused.clear()
    assert not gpu.device
