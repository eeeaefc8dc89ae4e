"""The watchdog: when it ends the process, and what it tells systemd."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from pathlib import Path

import pytest

from tests.support.clock import Clock
from vtx.runtime.errors import RequestError
from vtx.runtime.server.watchdog import LOOK_SECONDS, Watchdog, systemd


class Watched:
    """A watchdog over one thread, whose silence a test sets; what it ended with and told."""

    def __init__(self, limit: float = 600) -> None:
        self.silence, self.ended, self.told = 0.0, list[str](), list[str]()
        self.dog = Watchdog(lambda: {"llava": self.silence}, limit, self.ended.append, self.told.append)
        self.clock = Clock()
        self.dog.connections.clock = self.clock
        self.dog.connections.beat()

    def looks(self, *silences: float) -> list[str]:
        for self.silence in silences:
            self.dog.look()
        return self.ended


def test_a_thread_that_works_is_left_alone_and_systemd_hears_of_it() -> None:
    watched = Watched()
    assert watched.looks(0, 599, 0, 599, 599) == []
    assert watched.told == ["WATCHDOG=1"] * 5


@pytest.mark.parametrize("silence", [600, math.inf])
def test_silence_ends_the_process_and_systemd_hears_nothing(silence: float) -> None:
    watched = Watched()
    assert watched.looks(silence) == [], "it may have been stopped and continued"
    assert len(watched.looks(silence)) == 1
    assert watched.ended[0].startswith("llava gave no sign of life for 600 s")
    assert watched.told == []


def test_one_silence_between_signs_of_life_ends_nothing() -> None:
    assert Watched().looks(700, 0, 700, 0) == []


def test_connections_that_nobody_serves_end_the_process_too() -> None:
    watched = Watched()
    watched.clock.now += 600
    assert watched.looks(0, 0)[0].startswith("the thread of the connections gave no sign of life")


def test_it_looks_while_the_application_runs_and_tells_systemd_its_begin_and_end() -> None:
    watched = Watched()

    async def application() -> None:
        with dog.running(asyncio.get_running_loop()):
            while watched.told.count("WATCHDOG=1") < 3:
                await asyncio.sleep(0.001)

    dog = Watchdog(lambda: {}, 600, watched.ended.append, watched.told.append, look_seconds=0.001)
    asyncio.run(application())
    assert (watched.told[0], watched.told[-1]) == ("READY=1", "STOPPING=1")
    assert watched.ended == []


def test_a_systemd_that_is_gone_does_not_end_the_watchdog(caplog: pytest.LogCaptureFixture) -> None:
    def gone(_: str) -> None:
        raise ConnectionRefusedError("nobody listens")

    Watchdog(lambda: {}, 600, pytest.fail, gone).look()
    assert "nobody listens" in caplog.text


# --- systemd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("watched", ["", str(os.getpid()), "1"], ids=["unset", "own", "other"])
def test_systemd_is_told_at_its_socket(tmp_path: Path, abstract: bool, watched: str) -> None:
    name = f"@vtx-{os.getpid()}-{watched}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0"))
        listening.setblocking(False)
        environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": watched}
        notify, seconds = systemd(environment)
        notify("READY=1")
        assert listening.recv(100) == b"READY=1"
        notify("WATCHDOG=1")
        if watched == "1":  # another process is to give signs of life
            assert seconds == LOOK_SECONDS
            with pytest.raises(BlockingIOError):
                listening.recv(100)
        else:
            assert seconds == 1.5
            assert listening.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_is_sent() -> None:
    notify, seconds = systemd({})
    notify("READY=1")
    assert seconds == LOOK_SECONDS


@pytest.mark.parametrize(
    "environment", [{"WATCHDOG_USEC": "often"}, {"WATCHDOG_USEC": "0"}, {"NOTIFY_SOCKET": "vsock:2"}]
)
def test_what_systemd_never_sets_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=next(iter(environment))):
        systemd(environment)
