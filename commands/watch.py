"""vtx-watch: standing questions about the frames of cameras, streams and folders. It parses, calls and prints."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.serve import KEY, given_keys, listening, page_url, require_http
from vtx.commands.shared.options import FILE, PATH, option, options
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.terminal.console import command, end_on_sigterm, note, table
from vtx.tools.common.loading import Loading, about_model

if TYPE_CHECKING:
    from vtx.runtime.api.model import Model
    from vtx.tools.watch.config import WatchConfig


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """The options of vtx-watch; `port` is that of the live page."""

    bundle: Path
    config: Path
    check: bool
    parallel: int
    tile_cache: int
    port: int | None
    host: str
    loading: Loading

    def keys(self) -> list[str]:
        """The keys of the live page. Raises RequestError if other machines could see it without one."""
        from vtx.runtime.server.app import is_local

        keys = list(given_keys(None))
        if not is_local(self.host) and not keys:
            raise RequestError(
                f"--host {self.host} shows the pictures to other machines; set {KEY} to a key that they must send"
            )
        return keys


@command(
    epilog="vtx-watch vtx-demo-k16-fp16 watch.toml --check\nvtx-watch vtx-demo-k16-fp16 watch.toml > events.jsonl\n"
    "vtx-watch /srv/llava-7b /etc/vtx/watch.toml --device cuda"
)
@click.argument("bundle", type=PATH)
@click.argument("config", type=FILE)
@options(
    option(
        "--check",
        bool,
        "Validate the configuration, open each source and show the size of its first frame; ask nothing.",
    ),
    option("--parallel", 4, "Concurrent answers.", type=click.IntRange(1, 64)),
    option(
        "--tile-cache",
        256,
        "Cache of encoded tiles, reused in frames where they did not change; 0: off.",
        type=click.IntRange(0, 1_000_000),
        metavar="MB",
    ),
    option(
        "--page port",
        click.IntRange(0, 65535),
        "Serve a live page of frames and answers at this port; 0: any free one.",
        metavar="PORT",
    ),
    option("--host", "127.0.0.1", f"Address of the page; any but a loopback address needs {KEY}."),
    "device",
    "compute",
    "threads",
    "fit",
    "max_tiles",
    "max_pixels",
    "force",
    "require_signature",
    record=WatchSettings,
)
def watch(settings: WatchSettings) -> None:
    """Ask the standing questions of CONFIG about the latest frames of its sources; write events as JSON lines.

    Ends when all sources have ended, or with Ctrl-C. SIGHUP reloads CONFIG; an invalid one changes nothing.
    """
    from vtx.tools.watch.config import read_config
    from vtx.tools.watch.watch import check_questions

    end_on_sigterm()
    config = read_config(settings.config)
    keys = list[str]()
    if settings.port is not None:
        require_http()
        keys = settings.keys()
    with settings.loading.load(settings.bundle) as model:
        check_questions(model.loaded, config)
        if settings.check:
            _show_sources(settings.config, config, model)
        else:
            for line in about_model(model.manifest.model.name):
                note(line)
            _watch(settings, config, model, keys)


def _show_sources(path: Path, config: WatchConfig, model: Model) -> None:
    """Print the size of each source's first frame. Raises RequestError if a source gives none."""
    from vtx.tools.watch.sources import first_frames

    frames = first_frames(config, model.loaded.images.options.formats)
    texts = [str(size) if isinstance(size, VtxError) else f"{size[0]}x{size[1]}" for _, size in frames]
    table("", ("source", "first frame"), [[name, text] for (name, _), text in zip(frames, texts, strict=True)])
    if failed := sum(isinstance(size, VtxError) for _, size in frames):
        raise RequestError(f"{failed} of {len(frames)} sources give no frame, as the table says; fix them or {path}")


def _watch(settings: WatchSettings, config: WatchConfig, model: Model, keys: list[str]) -> None:
    """Ask the questions until all sources have ended."""
    from vtx.runtime.scheduler.engine import Engine
    from vtx.runtime.server.app import is_local
    from vtx.runtime.server.delivery import Output
    from vtx.runtime.server.watchdog import systemd
    from vtx.tools.watch.config import read_config
    from vtx.tools.watch.outputs import open_outputs
    from vtx.tools.watch.watch import Watcher, capacity

    notify, _ = systemd()
    logging.getLogger("vtx").setLevel(logging.INFO)
    with ExitStack() as closing:
        page = None
        at = None
        if settings.port is not None:
            from vtx.tools.watch.live_page import Page, serving

            page = Page(model.loaded.images.options.formats)
            at = closing.enter_context(listening(settings.host, settings.port))

        def outputs(config: WatchConfig) -> list[Output]:
            return [*open_outputs(config), *([] if page is None else [Output("page", page.tell)])]

        room = capacity(model.loaded, settings.parallel, settings.tile_cache << 20)
        engine = closing.enter_context(Engine("watch", model, room))
        watcher = Watcher(engine, config, parallel=settings.parallel, outputs=outputs)
        if page is not None and at is not None:
            page.watched = watcher.watched
            closing.enter_context(serving(page, at, keys, local_hosts=is_local(settings.host)))
            note(f"the page is at {page_url(settings.host, at)}")
        reread = partial(watcher.reload, partial(read_config, settings.config))
        if hasattr(signal, "SIGHUP"):  # a handler must not wait for locks that this thread may hold
            signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=reread, daemon=True).start())

        def tell(state: str) -> None:
            with suppress(OSError):  # systemd is away
                notify(state)

        tell("READY=1")
        try:
            watcher.run(partial(tell, "WATCHDOG=1"))
        finally:
            tell("STOPPING=1")
            watcher.close()
