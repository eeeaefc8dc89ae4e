"""One row each of several conversations in one run of a stage: what each gives alone, wherever its cache lies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.exported import THREADS
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.backends.backend import BatchBackend

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
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """`bundle(weights, kv)`: the folder of that bundle, exported once."""

    @cache
    def export(weights: str, kv: str | None) -> Path:
        options = ExportOptions(str(tiny_checkpoint(Tiny(text="qwen2"))), (3,), weights, 256, kv_precision=kv)
        return export_with(options, tmp_path_factory.mktemp("batches") / "bundle").folder

    return export


@pytest.fixture(params=ENGINES, scope="module", ids=str)
def backend(request: pytest.FixtureRequest, bundle: Callable[..., Path]) -> Iterator[tuple[Any, float]]:
    device, form = request.param
    if device == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]")
    weights, kv, compute, _ = form
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
            caches[-1].append(prompt, np.arange(length) * 2)
    assert engine.reaches(together)
    for step, chosen in enumerate(([0, 1, 2, 3, 4], [4, 2, 0], [3, 1])):
        rows = rng.standard_normal((len(chosen), HIDDEN)).astype(np.float32)
        positions = np.array([2 * LENGTHS[n] + 3 + step for n in chosen])
        got = engine.append_each(0, [together[n] for n in chosen], rows, positions)
        alone = [apart[n].append(rows[[i]], positions[[i]])[0].copy() for i, n in enumerate(chosen)]
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
    made[-1].append(np.ones((2, HIDDEN), np.float32), np.arange(2))
    del made
    assert engine.stage(0, 8).lane is not None
