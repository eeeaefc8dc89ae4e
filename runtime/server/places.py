"""The places of requests that are computed or wait: a full queue refuses the request that would begin last."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vtx.runtime.scheduler.scheduler import Job
from vtx.runtime.server.http import ClientLeft, Receive, until_left
from vtx.runtime.server.refusal import Refusal

RETRY_SECONDS = 2  # until a place may be free


@dataclass(eq=False, slots=True)
class Place:
    """A request's place. `order` is as of its `jobs`, which it has once it is prepared; `first`: of its first token.

    `ending` is done when nobody waits for the answer any more: because its client has left, or for a reason.
    """

    order: float
    ending: asyncio.Future[Refusal | None]
    jobs: Sequence[Job] = field(default_factory=list)
    first: float = math.nan  # by the monotonic clock

    @property
    def waits(self) -> bool:
        """True until one of its answers has begun."""
        return all(math.isnan(job.begun) for job in self.jobs)

    def check(self) -> None:
        """Raise ClientLeft, or Refusal for the reason, if nobody waits any more."""
        if self.ending.done():
            raise self.ending.result() or ClientLeft


class Places:
    """At most `most` places. The thread of the connections uses it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = list[Place]()

    @contextmanager
    def take(self, order: float, receive: Receive) -> Iterator[Place]:
        """A place until the end of the block, for a request whose body has been read.

        If there is none, one that waits and has a later `order` loses its own. Raises Refusal (429) if there is none.
        """
        if len(self._places) >= self._most:
            waiting = [place for place in self._places if place.waits]
            last = max(waiting, key=lambda place: place.order, default=None)
            if last is None or last.order <= order:
                raise self._full()
            self._end(last, self._full())
        place = Place(order, asyncio.get_running_loop().create_future())
        leaving = asyncio.ensure_future(until_left(receive))
        leaving.add_done_callback(lambda _: self._end(place, None))
        self._places.append(place)
        try:
            yield place
        finally:
            leaving.cancel()
            self._end(place, None)

    def _end(self, place: Place, reason: Refusal | None) -> None:
        if place in self._places:
            self._places.remove(place)
            place.ending.set_result(reason)

    def _full(self) -> Refusal:
        return Refusal(
            429,
            f"{self._most} requests are computed or wait, the limit; try again in {RETRY_SECONDS} s",
            code="queue_full",
            retry_after=RETRY_SECONDS,
        )
