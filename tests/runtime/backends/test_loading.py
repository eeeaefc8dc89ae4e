"""Graphs that are loaded side by side: in order, failures told, not where memory is short, the same answers."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from vtx.runtime.backends import memory
from vtx.runtime.backends.backend import Backend
from vtx.runtime.backends.memory import is_roomy, load_each, needed_memory
from vtx.runtime.backends.openvino import backend as openvino
from vtx.runtime.backends.ort import backend as ort
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.vision.tokens import TokenStates

FULL = 30  # seconds after which two that wait for each other are taken to run one after another


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tiny_checkpoint(), tmp_path_factory.mktemp("loading") / "bundle", (2, 3))


def test_graphs_load_at_the_same_time_and_come_back_in_order() -> None:
    met = threading.Barrier(2)

    def load(number: int) -> int:
        met.wait(FULL)
        return number

    assert load_each([lambda: load(1), lambda: load(2)], 2, (1, 1)) == [1, 2]


def test_one_thread_loads_one_graph_after_another() -> None:
    here = threading.get_ident()
    assert load_each([threading.get_ident] * 3, 1, (1, 2, 3)) == [here] * 3


def test_one_thread_begins_with_the_largest_graph_too() -> None:
    """What packing takes beside the weights then comes while the fewest others are there."""
    begun: list[str] = []

    def load(name: str) -> str:
        begun.append(name)
        return name

    loads = [partial(load, name) for name in ("small", "large", "middle")]
    assert load_each(loads, 1, (1, 3, 2)) == ["small", "large", "middle"]
    assert begun == ["large", "middle", "small"]


def test_the_largest_graphs_load_first() -> None:
    begun: list[str] = []
    halves = threading.Event()

    def large() -> str:
        begun.append("large")
        halves.wait(FULL)
        return "large"

    def small(name: str, *, last: bool = False) -> str:
        begun.append(name)
        if last:
            halves.set()
        return name

    loads = [lambda: small("first"), lambda: small("second", last=True), large]
    assert load_each(loads, 2, (1, 1, 2)) == ["first", "second", "large"]
    assert begun == ["large", "first", "second"], "or one thread waits while the other loads the large one"


def test_a_failure_is_raised_once_all_that_began_have_ended() -> None:
    met, raising, ended = threading.Barrier(2), threading.Event(), []

    def fail() -> None:
        met.wait(FULL)
        raising.set()
        raise OSError("the disk")

    def last() -> None:
        met.wait(FULL)
        ended.append(raising.wait(FULL))

    with pytest.raises(OSError, match="the disk"):
        load_each([fail, last], 2, (1, 1))
    assert ended == [True]


def test_a_load_takes_memory_to_be_quicker_where_twice_what_a_bundle_needs_is_free(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needed_memory(bundle)

    def with_free(free: int | None) -> bool:
        monkeypatch.setattr(memory, "available_memory", lambda: free)
        return is_roomy(bundle, "cpu")

    assert [with_free(free) for free in (0, None)] == [True, True], "a small one fits anywhere"
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    assert [with_free(free) for free in (2 * needed, 2 * needed - 1, None)] == [True, False, False]


@pytest.mark.parametrize("engine", [ort, openvino], ids=["cpu", "openvino"])
def test_what_is_loaded_side_by_side_computes_the_same(
    engine: object, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(*, roomy: bool) -> np.ndarray:
        asked = []
        monkeypatch.setattr(engine, "is_roomy", lambda *_: asked.append(1) or roomy)
        kind = ort.OrtBackend if engine is ort else openvino.OpenvinoBackend
        backend: Backend = kind(bundle, 2)
        assert asked
        hidden = backend.embed(np.arange(5)).hidden
        for number in range(len(bundle.manifest.stages)):
            hidden = backend.stage(number, 8).append(TokenStates(hidden), np.arange(5)).copy()
        found = backend.head(hidden)
        backend.close()
        return found

    assert len(bundle.manifest.stages) == 3
    assert np.array_equal(logits(roomy=False), logits(roomy=True))
