"""One row each of several conversations in one run of a stage: what each gives alone, wherever its cache lies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.gated import WAIT
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.backends import slots
from vtx.runtime.backends.backend import BatchBackend
from vtx.runtime.backends.ort.cache import OrtStage
from vtx.runtime.backends.slots import LanePool
from vtx.runtime.vision.tokens import TokenStates

CONVERSATIONS, HIDDEN = 6, Tiny().hidden
LENGTHS, CAPACITIES = (31, 32, 33, 1, 64), (256, 40, 256, 8, 66)  # a block of OpenVINO's has 32 slots
FULL = ("fp32", None, "f32", 1e-5)  # weights, K and V, arithmetic, and how far a share of the largest value may differ
ENGINES = [
    ("cpu", FULL),
    ("openvino", FULL),
    pytest.param(("cpu", ("fp16", "fp16", "f32", 1e-3)), marks=pytest.mark.slow),
    pytest.param(("openvino", ("fp16", "fp16", "bf16", 3e-2)), marks=pytest.mark.slow),
    pytest.param(("cpu", ("int4", "int8", "f32", 1e-2)), marks=pytest.mark.slow),
    pytest.param(("openvino", ("int8", "int8", "f32", 1e-2)), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Callable[..., Path]:
    """`bundle(weights, kv)`: the folder of that bundle, exported once."""

    @cache
    def export(weights: str, kv: str | None) -> Path:
        options = ExportOptions(str(tiny_checkpoint(Tiny(text="qwen2"))), (3,), weights, 256, kv_precision=kv)
        return export_with(options, tmp_path_factory.mktemp("batches") / "bundle").folder

    return export


@pytest.fixture(params=ENGINES, scope="module", ids=str)
def backend(
    request: pytest.FixtureRequest, bundle: Callable[..., Path], needs_arithmetic: Callable[[str], None]
) -> Iterator[tuple[Any, float]]:
    device, form = request.param
    if device == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]")
    weights, kv, compute, _ = form
    needs_arithmetic(compute)
    with load(bundle(weights, kv), device=device, compute=compute, threads=THREADS) as model:
        assert isinstance(model.backend, BatchBackend)
        model.backend.share_caches(CONVERSATIONS)
        yield model.backend, form[-1]


def test_rows_and_slots_are_those_of_each_alone(backend: tuple[Any, float]) -> None:
    """Caches that are compared lie between those that run together, and stay what they were."""
    engine, tolerance = backend
    rng = np.random.default_rng(0)
    together: list[Any] = []
    apart: list[Any] = []
    for length, capacity in zip(LENGTHS, CAPACITIES, strict=True):
        prompt = rng.standard_normal((length, HIDDEN)).astype(np.float32)
        for caches in (together, apart):
            caches.append(engine.stage(0, capacity))
            caches[-1].append(TokenStates(prompt), np.arange(length) * 2)
    assert engine.reaches(together)
    for step, chosen in enumerate(([0, 1, 2, 3, 4], [4, 2, 0], [3, 1])):
        rows = rng.standard_normal((len(chosen), HIDDEN)).astype(np.float32)
        positions = np.array([2 * LENGTHS[n] + 3 + step for n in chosen])
        got = engine.append_each(0, [together[n] for n in chosen], TokenStates(rows), positions, [1] * len(chosen))
        alone = [apart[n].append(TokenStates(rows[[i]]), positions[[i]])[0].copy() for i, n in enumerate(chosen)]
        assert np.abs(got - alone).max() <= tolerance * np.abs(got).max()
    assert [cache.length for cache in together] == [cache.length for cache in apart]
    for one, other in zip(together, apart, strict=True):
        keys = other.keys()
        np.testing.assert_allclose(one.keys(), keys, atol=tolerance * np.abs(keys).max())


def test_without_room_a_cache_lies_alone_and_lanes_come_back(backend: tuple[Any, float]) -> None:
    engine, _ = backend
    gc.collect()
    made = [engine.stage(0, 8) for _ in range(2 * CONVERSATIONS + 1)]
    lanes = {cache.lane.number for cache in made[:-1]}
    assert lanes == set(range(2 * CONVERSATIONS))
    assert made[-1].lane is None
    assert not engine.reaches(made)
    made[-1].append(TokenStates(np.ones((2, HIDDEN), np.float32)), np.arange(2))
    del made
    assert engine.stage(0, 8).lane is not None


def test_a_run_that_fails_while_caches_change_places_loses_nothing(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(bundle("fp32", None), device="cpu", threads=THREADS) as model:
        engine: Any = model.backend
        engine.share_caches(CONVERSATIONS)
        rng = np.random.default_rng(1)
        prompts, rows = (rng.standard_normal((3, count, HIDDEN)).astype(np.float32) for count in (5, 1))
        caches, alone = ([engine.stage(0, 64) for _ in prompts] for _ in range(2))
        for cache, prompt in zip((*caches, *alone), (*prompts, *prompts), strict=True):
            cache.append(TokenStates(prompt), np.arange(5))
        bind, left = OrtStage.bind, [1]

        def failing(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError
            return bind(*args)

        monkeypatch.setattr(OrtStage, "bind", failing)
        apart = [caches[0], alone[2]]  # lanes 0 and 5: one changes places with a cache of another prompt
        with pytest.raises(MemoryError):
            engine.append_each(0, apart, TokenStates(rows[:2, 0]), np.array([5, 5]), [1, 1])
        monkeypatch.undo()
        for cache, other, row in zip(caches, alone, rows, strict=True):
            one, same = (one.append(TokenStates(row), np.array([5])).copy() for one in (cache, other))
            assert np.array_equal(one, same)


def test_a_lane_may_come_back_while_another_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that runs there finds a cache that nobody holds."""
    pool = LanePool([(4, 8)], 2, np.dtype(np.float32))
    one, other = pool.take(), pool.take()
    assert one is not None
    assert other is not None
    forgotten = [other]

    def collecting(_: Any) -> None:
        if forgotten:
            pool.give_back(forgotten.pop())

    monkeypatch.setattr(slots, "forget", collecting)
    giving = threading.Thread(target=pool.give_back, args=(one,), daemon=True)
    giving.start()
    giving.join(WAIT)
    assert not giving.is_alive()
    assert {lane.number for lane in (pool.take(), pool.take()) if lane} == {0, 1}
