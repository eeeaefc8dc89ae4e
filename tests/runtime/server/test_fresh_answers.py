"""Requests side by side over HTTP, at any settings, some of whose clients leave: fresh single answers to all others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh import FreshAnswers, Setting
from tests.support.serving import Served, asking, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.server.limits import Limits

CLIENTS = 4
OPTIONS = Options(max_new_tokens=8, ignore_eos=True, logprobs=True)
IMAGES = {"one": random_image(1), "two": random_image(2, (40, 90)), "three": random_image(3)}
QUESTIONS = ("red?", "how many?", "which one is it?")
FASTV = "fastv:k=3,ratio=0.5"
SETTINGS: tuple[Setting, ...] = (("none", "none"), (3, "none"), (5, "none"), ("none", FASTV), (5, FASTV))
Asked = tuple[list[str], str, Setting]


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    """Fewer conversations are kept, and answers computed together, than clients ask for."""
    with serving({"tiny": tiny_bundle}, Limits(parallel=3, batch=3, kept=2, image_tokens=1 << 15)) as served:
        yield served


@pytest.fixture(scope="module")
def fresh(local: Model) -> FreshAnswers:
    return FreshAnswers(local, IMAGES, OPTIONS)


def body(asked: Asked, **fields: Any) -> dict[str, Any]:
    names, question, (k, reduce) = asked
    return asking(
        user(question, *(IMAGES[name] for name in names)), k=k, reduce=reduce, logprobs=True, **fields
    )  # fmt: skip


def result(completion: dict[str, Any]) -> dict[str, Any]:
    """What `vtx-run --json` would print of it."""
    (choice,) = completion["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return {**completion["usage"]["vtx"], "text": choice["message"]["content"], "logprobs": logprobs}


def test_the_answers_of_these_tests_can_be_told_apart(fresh: FreshAnswers) -> None:
    assert fresh.differ(*(([name], QUESTIONS[0], SETTINGS[0]) for name in IMAGES))
    assert fresh.differ(*((["one"], question, SETTINGS[0]) for question in QUESTIONS))
    assert fresh.differ(*((["one"], QUESTIONS[0], setting) for setting in SETTINGS))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(9))
def test_requests_side_by_side_get_fresh_answers(served: Served, fresh: FreshAnswers, seed: int) -> None:
    def client(number: int) -> list[tuple[Asked, dict[str, Any]]]:
        rng, answered = random.Random(1000 * seed + number), []
        for _ in range(4):
            names = rng.sample(list(IMAGES), rng.choice((0, 1, 1, 2)))
            asked = names, rng.choice(QUESTIONS), rng.choice(SETTINGS)
            if rng.random() < 0.25:
                with served.open_chat(body(asked, stream=True)) as connection:
                    connection.recv(rng.randint(1, 2000))  # and leaves
                continue
            response = served.chat(body(asked, reuse=rng.random() < 0.8))
            assert response.status == 200, response.body
            answered.append((asked, result(response.json)))
        return answered

    with ThreadPoolExecutor(CLIENTS) as clients:
        answered = [one for answers in clients.map(client, range(CLIENTS)) for one in answers]
    assert answered
    for asked, found in answered:
        fresh.check(found, *asked)
    served.until_active(0, "the answers of those who left have ended")
