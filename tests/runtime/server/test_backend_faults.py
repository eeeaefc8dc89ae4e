"""A backend that raises, hangs or ends its thread in any of its calls: others are answered as alone, health is true."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.clock import Clock
from tests.support.serving import WAIT, Response, Served, asking, serving, until, user
from tests.support.tiny import random_image
from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.errors import DeviceError
from vtx.runtime.server.limits import Limits

IMAGES = [random_image(seed) for seed in range(2)]
WORDS = ("red?", "how many circle shapes?", "what is the colour?", "which is left?", "blue?", "is it?")
ASKED = [
    asking(user(words, *([IMAGES[n % 3]] if n % 3 < 2 else [])), k=("none", 3)[n % 2], reduce="none")
    for n, words in enumerate(WORDS)
]
PLACES = ("vision", "embed", "stage", "append", "append_each", "head")
ROOM = 4 << 20


@pytest.fixture(scope="module")
def wanted(tiny_bundle: Path) -> list[list[int]]:
    """The ids of each answer alone."""
    with serving({"tiny": tiny_bundle}) as served:
        return [served.chat(body).json["usage"]["vtx"]["token_ids"] for body in ASKED]


@contextmanager
def failing(served: Served, place: str, at: int, fault: Callable[[], Any]) -> Iterator[threading.Event]:
    """The `at`-th call of the backend's `place` does `fault` first; set once it does."""
    backend, calls, reached = served.engines.loaded[0].model.backend, count(1), threading.Event()
    owner: Any = SlotCounter if place == "append" else backend
    original = getattr(owner, place)

    def call(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            reached.set()
            fault()
        return original(*given, **named)

    with patch.object(owner, place, call):
        yield reached


@contextmanager
def fresh(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}, Limits(kv=ROOM, image_tokens=0)) as served:
        assert served.chat(asking(user("warm"))).status == 200
        yield served


def at_once(served: Served) -> list[Response]:
    with ThreadPoolExecutor(len(ASKED)) as clients:
        return list(clients.map(served.chat, ASKED))


def health(served: Served) -> list[int]:
    return [served.request("GET", path).status for path in ("/livez", "/readyz")]


def ids(response: Response) -> list[int]:
    assert response.status == 200, response.body
    found: list[int] = response.json["usage"]["vtx"]["token_ids"]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [DeviceError("out of luck"), MemoryError(), RuntimeError("a bug")], ids=repr)
def test_a_backend_that_raises_ends_at_most_one_answer(
    tiny_bundle: Path, wanted: list[list[int]], place: str, error: Exception
) -> None:
    def fault() -> None:
        raise error

    with fresh(tiny_bundle) as served:
        pool = served.engines.loaded[0].pool
        with failing(served, place, 2, fault) as reached:
            responses = at_once(served)
        assert reached.is_set()
        failed = [response for response in responses if response.status != 200]
        assert len(failed) <= 1, "of a pass that fails each answer is computed by itself"
        for response in failed:
            assert response.status in (500, 503)
            assert response.json["error"]["type"] == "server_error"
            assert "out of luck" not in response.json["error"]["message"], "the log says it, not the client"
            assert response.status == 500 or response.headers["retry-after"]
        for response, expected in zip(responses, wanted, strict=True):
            assert response in failed or ids(response) == expected
        assert health(served) == [200, 200]
        until(lambda: pool.fits(ROOM), "no answer holds memory")
        assert [ids(response) for response in at_once(served)] == wanted


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
def test_a_backend_that_hangs_is_told_and_what_waits_is_answered_when_it_returns(
    tiny_bundle: Path, wanted: list[list[int]], place: str
) -> None:
    released, clock = threading.Event(), Clock()
    with fresh(tiny_bundle) as served, ThreadPoolExecutor(1) as asking_all:
        heartbeat = served.engines.loaded[0].scheduler.heartbeat
        with failing(served, place, 2, lambda: released.wait(WAIT)) as reached:
            try:
                answers = asking_all.submit(at_once, served)
                assert reached.wait(WAIT)
                with patch.object(heartbeat, "clock", clock), patch.object(heartbeat, "last", clock()):
                    seen = [health(served)]
                    for seconds in (301, 300):
                        clock.now += seconds
                        seen.append(health(served))
                    late = served.chat({**ASKED[0], "deadline_ms": 50})
            finally:
                released.set()
            responses = answers.result(WAIT)
        assert seen == [[200, 200], [200, 503], [503, 503]]
        assert late.status in (408, 429)
        assert late.headers["x-should-retry"] == "false"
        assert [ids(response) for response in responses] == wanted
        until(lambda: health(served) == [200, 200], "it computes again")


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("place", PLACES)
def test_a_backend_that_ends_the_thread_fails_all_that_wait_at_once(tiny_bundle: Path, place: str) -> None:
    with fresh(tiny_bundle) as served, failing(served, place, 2, sys.exit) as reached:
        responses = at_once(served)
        assert reached.is_set()
        for response in responses:
            assert response.status in (200, 503)
            assert response.status == 200 or response.json["error"]["type"] == "server_error"
            assert response.status == 200 or response.headers["retry-after"]
        assert health(served) == [503, 503]
        assert "has ended" in served.request("GET", "/livez").json["status"]
        assert served.chat(ASKED[0]).status == 503
