"""Settings of the application beside its bundles and limits: its clients, its logs, its supervisor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from vtx.runtime.server.keys import Keys
from vtx.runtime.server.tracing import Tracing
from vtx.runtime.server.watchdog import Watchdog


@dataclass(slots=True)
class Traffic:
    """`inside`: requests that are read, computed or wait. While `draining` no more are let in."""

    inside: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class AppSettings:
    """The settings of the application.

    `api_keys`: clients must send one of them, if there are any. `local_hosts`: accept only requests that name this
    machine in their Host header, so that pages of other hosts cannot send any through a browser. `image_hosts`: images
    may be given by their address there. `origins`: pages of these may send requests. `lenient`: ignore what is not
    supported, and say so. `watchdog` runs as long as the application. `traffic` is what a supervisor of the process
    sees of it. `access` gets a line of each request, with `access_json` as JSON. `tracing` gets its spans. `figures`
    are further ones for /metrics.
    """

    api_keys: Keys | Collection[str] = ()
    local_hosts: bool = True
    image_hosts: Collection[str] = ()
    origins: Collection[str] = ()
    lenient: bool = False
    watchdog: Watchdog | None = None
    traffic: Traffic = field(default_factory=Traffic)
    access: Callable[[str], None] | None = None
    access_json: bool = False
    tracing: Tracing | None = None
    figures: Callable[[], Mapping[str, float]] = dict
