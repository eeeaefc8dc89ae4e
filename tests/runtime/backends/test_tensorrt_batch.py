"""Tokens of several conversations in one run of TensorRT's engines: what each gives alone, and the work of a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import copy
from tests.support.engines import SMALL_GROWTH, open_model, rewrite
from tests.support.exported import QUESTIONS
from tests.support.gpu_standin import Gpu
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends import device_lanes
from vtx.runtime.backends.slots import LANES
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.runtime.scheduler.batching import Batching
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.tensorrt.graph import load_graph

STEPS = 12
COUNTED = ("enqueue", "cuGraphLaunch", "cuStreamSynchronize")


@pytest.fixture
def backend(with_engines: Path, device: Gpu) -> TensorrtBackend:
    backend = TensorrtBackend(Bundle.open(with_engines))
    backend.share_caches(LANES)
    return backend


def streams(model: Model, count: int) -> list[AnswerStream]:
    """Answers to questions of different lengths, about images that leave at different K."""
    options = Options(STEPS, ignore_eos=True)
    started = []
    for number in range(count):
        question = QUESTIONS[number % 2] * (1 + number % 3)
        started.append(model.open([random_image(number)]).stream(question, (None, 2, 3)[number % 3], options))
    return started


@pytest.mark.sampled
@pytest.mark.parametrize("jetpack", [None, 6])
def test_the_work_of_a_token_is_that_of_one_client_whatever_the_number(
    jetpack: int | None,
    with_engines: Path,
    request: pytest.FixtureRequest,
    device: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_lanes, "GROWTH", 256)
    folder = request.getfixturevalue("on_jetpack_6") if jetpack else with_engines
    model = open_model(folder)
    count = 2 if jetpack else LANES  # of a Jetson's engines
    alone = [stream.read().token_ids for stream in streams(model, count)]
    batching = Batching(model, LANES, LANES)
    assert batching.obstacle is None
    together = streams(model, count)
    for stream in together:
        stream.step()
    for _ in range(3):  # so that lanes are taken, and runs are recorded
        batching.decode(together)
        for stream in together:
            stream.step()
    device.calls.clear()
    device.copies.clear()
    device.moved.clear()
    batching.decode(together)
    stages = len(model.manifest.stages)
    launches = {"cuGraphLaunch": stages, "enqueue": 2} if jetpack else {"cuGraphLaunch": 0, "enqueue": 2 + stages}
    assert {name: device.calls[name] for name in COUNTED} == {**launches, "cuStreamSynchronize": 3}
    graphs = model.manifest.dialects["trt10" if jetpack else "trt"]
    weights = sum(load_graph(folder / name).weights for name in (*graphs.stages, graphs.head))
    assert sum(nbytes for kind, nbytes in device.moved if kind == "weights") == weights
    hidden, vocab = model.manifest.model.hidden, model.manifest.model.vocab
    numbers = 8 + stages * (8 + 4)  # an id, and positions and slots of each stage
    assert sum(nbytes for side, nbytes in device.copies if side == "in") == count * (numbers + 4 * hidden)
    assert sum(nbytes for side, nbytes in device.copies if side == "out") == count * 4 * (2 * hidden + vocab)
    for stream in together:
        stream.step()
    assert [stream.read().token_ids for stream in together] == alone


def test_clients_beyond_the_lanes_move_in_and_out_without_a_wait(on_jetpack_6: Path, device: Gpu) -> None:
    model = open_model(on_jetpack_6)
    batching = Batching(model, LANES, LANES)
    together = streams(model, LANES)
    for stream in together:
        stream.step()
    for _ in range(3):  # so that there is memory for all
        device.calls.clear()
        device.moved.clear()
        batching.decode(together)
        for stream in together:
            stream.step()
    assert device.calls["cuStreamSynchronize"] == 3
    graphs = model.manifest.dialects["trt10"]
    read = {name: load_graph(on_jetpack_6 / name).weights for name in (*graphs.stages, graphs.head)}
    runs = LANES // 2  # of pairs
    weights = sum((1 if name == graphs.head else runs) * nbytes for name, nbytes in read.items())
    assert sum(nbytes for kind, nbytes in device.moved if kind == "weights") == weights


def test_lanes_grow_with_the_longest_conversation_and_shrink_after_it(
    backend: TensorrtBackend, with_engines: Path
) -> None:
    rng = np.random.default_rng(0)
    engine: Any = backend
    hidden = Bundle.open(with_engines).manifest.model.hidden
    lengths = (5, 20, 100)
    together, apart = ([engine.stage(0, 256) for _ in lengths] for _ in range(2))
    for length, *caches in zip(lengths, together, apart, strict=True):
        prompt = rng.standard_normal((length, hidden)).astype(np.float32)
        for cache in caches:
            cache.append(TokenStates(prompt), np.arange(length))
    capacities = []
    for chosen in ([0, 1], [2, 1, 0], [1, 0], [0, 2], [2, 0, 1]):
        rows = rng.standard_normal((len(chosen), hidden)).astype(np.float32)
        positions = np.array([together[n].length for n in chosen])
        states = np.asarray(
            engine.append_each(0, [together[n] for n in chosen], TokenStates(rows), positions, [1] * len(chosen))
        )
        alone = [np.asarray(apart[n].append(TokenStates(rows[[i]]), positions[[i]]))[0] for i, n in enumerate(chosen)]
        np.testing.assert_allclose(states, alone, atol=1e-5)
        keys = together[chosen[0]].regions()[0]
        capacities.append(keys.pitch // (LANES * keys.row * SMALL_GROWTH))
    assert capacities == [1, 4, 1, 4, 4]


def test_without_memory_for_lanes_each_answer_is_computed_by_itself(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    alone = [stream.read().token_ids for stream in streams(model, 3)]
    batching = Batching(model, LANES, LANES)
    together = streams(model, 3)
    for stream in together:
        stream.step()
    for number in range(STEPS - 1):
        if number != 4:  # then there is memory, and after it lanes are too short
            device.errors["cuMemAlloc_v2"] = 2
        batching.decode(together)
        device.errors.clear()
        for stream in together:
            stream.step()
    assert [stream.read().token_ids for stream in together] == alone
    assert 0 < batching.passes < STEPS - 1
    assert batching.obstacle is None


def test_engines_of_one_conversation_say_how_to_have_several(with_engines: Path, tmp_path: Path, device: Gpu) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    engines = fingerprint.read_engines(Bundle.open(folder), "sm89").engines
    for graph, record in engines.items():
        profiles = tuple({size: r for size, r in profile.items() if size != "batch"} for profile in record.profiles)
        engines[graph] = replace(record, profiles=profiles)
    rewrite(folder, engines=engines)
    with pytest.raises(DeviceError, match=r"take one conversation at a time; build them with: .* --batch 8$"):
        open_model(folder).backend.share_caches(2)
