"""Many clients at once: every answer is the one that its question has alone, and memory stays."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.serving import Served, asking, serving, until, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.server.limits import Limits

IMAGES = [random_image(seed) for seed in range(3)]
QUESTIONS = ["red?", "how many circle shapes?", "what is the colour?", "which is left?"]
CLIENTS = 8


def bodies() -> list[dict[str, Any]]:
    """Every image and none, every question, three settings."""
    return [
        asking(user(question, *([IMAGES[image]] if image < 3 else [])), k=k, reduce=reduce)
        for image in range(4)
        for question in QUESTIONS
        for k, reduce in (("none", "none"), (3, "none"), ("none", "fastv:k=3,ratio=0.5"))
    ]


def ids_of(served: Served, body: dict[str, Any], *, stream: bool) -> list[int]:
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = served.chat({**body, **extra})
    assert response.status == 200
    completion = response.events[-1] if stream else response.json
    ids: list[int] = completion["usage"]["vtx"]["token_ids"]
    return ids


def expected(local: Model, body: dict[str, Any]) -> list[int]:
    answer = local.generate(body["messages"], body["k"], reduce=body["reduce"], max_new_tokens=8, ignore_eos=True)
    return list(answer.token_ids)


def load(served: Served, wanted: list[tuple[dict[str, Any], list[int]]], requests: int) -> None:
    """Ask that many times from all clients; some leave before they have read a thing."""
    draw = random.Random(1)
    asked = [(draw.choice(wanted), draw.random()) for _ in range(requests)]

    def ask(one: tuple[tuple[dict[str, Any], list[int]], float]) -> None:
        (body, ids), chance = one
        if chance < 0.1:
            served.open_chat(body).close()
        else:
            assert ids_of(served, body, stream=chance < 0.5) == ids

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert len(list(pool.map(ask, asked))) == requests


@pytest.mark.slow
def test_two_hundred_mixed_requests_are_neither_lost_nor_mixed_up(tiny_bundle: Path, local: Model) -> None:
    wanted = [(body, expected(local, body)) for body in bodies()]
    with serving({"tiny": tiny_bundle}, Limits(kv=4 << 20)) as served:
        load(served, wanted, 60)
        process = psutil.Process(os.getpid())
        before = process.memory_info().rss
        load(served, wanted, 200)
        until(lambda: served.metrics()["vtx_requests_active"] == 0, "all have ended")
        figures = served.metrics()
        assert figures["vtx_kv_kept_bytes"] <= 4 << 20
        assert figures["vtx_conversation_hits_total"] > 50
        assert set(served.engines.loaded) == {served.engines.loaded[0]}
        assert process.memory_info().rss - before < 64 << 20
