"""Chunks that continue each other: the guidance as stated in the paper, and a loop that computes while it executes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from vtx.runtime.api.action_loop import ActionLoop
from vtx.runtime.api.chunks import ChunkGuide, Continuation
from vtx.runtime.errors import DeadlineError, RequestError


def stated_weight(number: int, delay: int, overlap: int, schedule: str) -> float:
    """The paper's Equation 5, with its exponential and the two plain forms beside it."""
    if number < delay:
        return 1.0
    if number >= overlap or schedule == "zeros":
        return 0.0
    c = (overlap - number) / (overlap - delay + 1)
    return {"linear": c, "exp": c * np.expm1(c) / (np.e - 1), "ones": 1.0}[schedule]


@pytest.mark.parametrize("schedule", ["linear", "exp", "ones", "zeros"])
@pytest.mark.parametrize(
    ("delay", "overlap", "count"), [(0, 0, 4), (2, 5, 8), (3, 3, 6), (2, 9, 4), (7, 5, 9), (1, 20, 12)]
)
def test_weights_are_those_of_the_paper(schedule: str, delay: int, overlap: int, count: int) -> None:
    weights = Continuation(np.zeros((count, 3)), delay, overlap, schedule).weights(count, 12)
    end = min(overlap, count)
    wanted = [stated_weight(number, min(delay, end), end, schedule) for number in range(12)]
    np.testing.assert_allclose(weights, wanted, atol=1e-6)


@pytest.mark.parametrize("time", [1.0, 0.9, 0.5, 0.1])
def test_a_guide_adds_the_weighted_error_of_the_end_as_the_paper_states_it(time: float) -> None:
    chance = np.random.default_rng(0)
    left, noisy, velocity = chance.standard_normal((3, 6, 4)).astype(np.float32)
    weights = np.array([1, 1, 0.5, 0.25, 0, 0], np.float32)
    tau = 1 - time  # the paper's time
    r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
    strength = min(5.0, (1 - tau) / (tau * r2)) if tau > 0 else 5.0
    end = noisy + (1 - tau) * -velocity
    wanted = -velocity + strength * np.diag(weights) @ (left - end)
    np.testing.assert_allclose(-ChunkGuide(left, weights, 5.0)(noisy, velocity, time), wanted, atol=1e-5)


class Model:
    """Chunks of 6 actions that count up; each is there when the test says so."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.ready = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.fails = False

    def act(self, images: Any, instruction: str, state: Any, **options: Any) -> np.ndarray:
        self.calls.append({"images": images, "state": state, **options})
        self.begun.release()
        self.ready.acquire()
        if self.fails:
            raise DeadlineError("late")
        number = len(self.calls)
        return (100 * number + np.arange(6, dtype=np.float32))[:, None]


@pytest.fixture
def model() -> Model:
    return Model()


def finish(loop: ActionLoop, model: Model) -> None:
    """Let the running computation end."""
    model.ready.release()
    while loop.computing:
        pass


def test_a_loop_executes_what_is_left_while_it_computes_and_drops_the_time_that_passed(model: Model) -> None:
    with ActionLoop(model, "go", every=3, guidance={"overlap": 4}, k=5) as loop:  # type: ignore[arg-type]
        model.ready.release()
        assert [loop.step(f"frame {n}", n)[0] for n in range(3)] == [100, 101, 102]
        assert loop.step("frame 3", 3)[0] == 103  # the next chunk is begun here
        assert loop.step("frame 4", 4)[0] == 104
        finish(loop, model)
        assert loop.step("frame 5", 5)[0] == 202  # two actions were executed meanwhile
        second = model.calls[1]
        assert (second["images"], second["state"], second["k"]) == ("frame 3", 3, 5)
        np.testing.assert_array_equal(second["after"].left, [[103], [104], [105]])
        assert (second["after"].delay, second["after"].overlap) == (1, 4)
        assert loop.delay == 2
        assert [loop.step("frame", 0)[0] for _ in range(2)] == [203, 204]
        model.begun.acquire(), model.begun.acquire()
        assert loop.step("frame 8", 8)[0] == 205
        model.begun.acquire()
        assert model.calls[2]["after"].delay == 1  # no more than what is left
        model.ready.release()
        assert loop.step("frame 9", 9)[0] == 301  # waits: nothing is left


def test_a_loop_goes_on_after_an_error(model: Model) -> None:
    with ActionLoop(model, "go") as loop:  # type: ignore[arg-type]
        model.fails = True
        model.ready.release()
        with pytest.raises(DeadlineError):
            loop.step("frame", 0)
        model.fails = False
        model.ready.release()
        assert loop.step("frame", 0)[0] == 200


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"delay": -1}, "delay is -1"), ({"overlap": -1}, "overlap is -1"), ({"schedule": "cubic"}, "linear, exp, ones"),
     ({"strength": 0}, "strength is 0")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Continuation(np.zeros((2, 3)), **{"delay": 1, **changed})
