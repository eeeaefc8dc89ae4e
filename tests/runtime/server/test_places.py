"""Which of the requests that are computed or wait loses its place in a full queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vtx.runtime.scheduler.scheduler import Job
from vtx.runtime.server.places import Places
from vtx.runtime.server.refusal import Refusal


async def receive() -> Any:
    """A client that stays."""
    await asyncio.Event().wait()


def job(begun: float | None = None) -> Job:
    stream: Any = None
    made = Job(lambda: stream, lambda _: None, lambda _: None)
    made.begun = made.begun if begun is None else begun
    return made


@pytest.mark.parametrize(("order", "refused"), [(6, True), (5, True), (4, False)])
def test_only_a_request_that_would_begin_later_gives_way(order: float, refused: bool) -> None:
    async def ask() -> bool:
        places = Places(1)
        with places.take(5, receive) as waiting:
            try:
                with places.take(order, receive):
                    with pytest.raises(Refusal, match="1 requests are computed or wait"):
                        waiting.check()
                    return False
            except Refusal:
                waiting.check()
                return True

    assert asyncio.run(ask()) is refused


def test_a_request_of_several_answers_keeps_its_place_once_one_of_them_runs() -> None:
    async def ask() -> None:
        places = Places(1)
        with places.take(5, receive) as first:
            first.jobs = [job(), job(1.0)]
            with pytest.raises(Refusal), places.take(0, receive):
                pass
            first.check()
            first.jobs = [job(), job()]
            with places.take(0, receive), pytest.raises(Refusal):
                first.check()

    asyncio.run(ask())
