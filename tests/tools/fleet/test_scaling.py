"""Replicas start while too many requests come, and end when they do not."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import deployed, replicas
from tests.support.serving import Served, asking, user
from tests.support.tiny import random_image

from vtx.runtime.errors import RequestError
from vtx.tools.fleet.arguments import Fleet

CLIENTS = 6
PATIENCE = 300  # seconds; Ray Serve judges by the mean of the last half minute


@pytest.fixture(scope="module")
def fleet(bundle: Path) -> Iterator[Served]:
    arguments: dict[str, Any] = {"bundle": f"tiny={bundle}", "replicas": 1, "max_replicas": 2, "cores": 1}
    arguments |= {"device": "cpu", "parallel": 1, "up_seconds": 1, "down_seconds": 1}
    with deployed(arguments) as served:
        yield served


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='ray is not installed; pip install "vtx-edge[ray]"')
def test_a_queue_makes_another_replica_start_and_its_end_makes_it_end(fleet: Served) -> None:
    assert len(replicas()) == 1
    enough = threading.Event()
    statuses = set[int]()

    def ask(client: int) -> None:
        body = json.dumps(asking(user("red?", random_image(client)), k="none", reduce="none", max_tokens=100)).encode()
        while not enough.is_set():
            statuses.add(fleet.request("POST", "/v1/chat/completions", body, content_type="application/json").status)

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking_them = [pool.submit(ask, client) for client in range(CLIENTS)]
        grown = _becomes(2)
        enough.set()
        for one in asking_them:
            one.result()
    assert grown, "no further replica started"
    assert statuses <= {200, 429}
    assert 200 in statuses
    assert _becomes(1), "no replica ended"
    reply = fleet.chat(asking(user("red?"), k="none", reduce="none"))
    assert reply.status == 200


def _becomes(count: int) -> bool:
    """True once so many replicas run; False if they do not in time."""
    pause = threading.Event()
    for _ in range(PATIENCE):
        if len(replicas()) == count:
            return True
        pause.wait(1)
    return False


@pytest.mark.parametrize("name", ["up_seconds", "down_seconds"])
def test_times_are_checked(name: str) -> None:
    for value in ("-1", "nan", "inf"):
        with pytest.raises(RequestError, match=f"{name}.* is"):
            Fleet.read({"bundle": "a", name: value})
