"""vtx-serve: bundles behind OpenAI's API, with a page to look at. It parses, calls and prints."""

from __future__ import annotations

import errno
import faulthandler
import ipaddress
import logging
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from vtx.commands.shared.bundles import find_bundle
from vtx.commands.shared.options import option, options
from vtx.runtime.errors import BundleError, DeviceError, RequestError, VtxError
from vtx.runtime.installing import install
from vtx.runtime.terminal.console import command, note
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from uvicorn import Config

    from vtx.runtime.api.model import Model
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.server.delivery import Output
    from vtx.runtime.server.engines import Engines
    from vtx.runtime.server.http import App
    from vtx.runtime.server.keys import Keys, Tenant
    from vtx.runtime.server.limits import Limits
    from vtx.runtime.server.settings import AppSettings

KEY = "VTX_API_KEY"
OTHER_FILES = 256  # next to its connections: bundles, decoders of videos, logs
FLUSH_SECONDS = 10  # for the last replies to be sent
LARGEST_AMOUNT = 1_000_000  # of gigabytes, or of seconds


def _amount(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Gigabytes or seconds; NaN is refused as well."""
    if value is not None and not 0 <= value <= LARGEST_AMOUNT:
        raise click.BadParameter(f"{value} is not a number from 0 to {LARGEST_AMOUNT:,}")
    return value


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The options of vtx-serve."""

    bundles: tuple[str, ...]
    folder: Path | None
    hub_model: str | None
    precision: str | None
    aliases: tuple[str, ...]
    host: str
    port: int
    parallel: int | None
    max_batch: int | None
    queue: int | None
    max_tokens: int | None
    max_body: int | None
    timeout: float | None
    stall_timeout: float | None
    grace: float | None
    kv_cache: float | None
    memory: float | None
    reports: tuple[Path, ...]
    max_accuracy_drop: float
    image_hosts: tuple[str, ...]
    origins: tuple[str, ...]
    api_keys: Path | None
    proxies: tuple[str, ...]
    unix_socket: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    otlp: str | None
    access_log: str | None
    no_auth: bool
    lenient: bool
    loading: Loading

    @property
    def local(self) -> bool:
        """True if no other machine reaches `host`."""
        from vtx.runtime.server.app import is_local

        return is_local(self.host)

    def listening(self) -> AbstractContextManager[socket.socket]:
        """The socket that clients connect to."""
        return listening(self.host, self.port) if self.unix_socket is None else listening_at(self.unix_socket)

    def address(self, at: socket.socket) -> Path | str:
        """The address of the server that listens `at`, for browsers and clients."""
        return self.unix_socket or page_url(self.host, at, tls=self.tls_cert is not None)


@command(
    epilog="vtx-serve --bundle vtx-demo-k16-fp16\n"
    "vtx-serve --bundle small=demo --bundle large=llava-7b --memory 24\n"
    f"{KEY}=secret vtx-serve --host 0.0.0.0 --port 8000"
)
@options(
    option(
        "--bundle bundles",
        str,
        "Bundle to serve, under its directory's name or NAME; repeat for more, loaded on demand [default: as vtx-run].",
        multiple=True,
        metavar="[NAME=]DIR",
    ),
    option(
        "--bundles folder",
        Path,
        "Serve the bundle in each directory of DIR under that directory's name; follow new, changed and removed ones.",
        metavar="DIR",
    ),
    "hub_model",
    "hub_precision",
    option("--alias aliases", str, "Another name of a bundle; repeat for more.", multiple=True, metavar="ALIAS=NAME"),
    option("--host", "127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces."),
    option("--port", 8000, "Port to listen on; 0: any free one.", type=click.IntRange(0, 65535)),
    option("--parallel", click.IntRange(1), "Concurrent answers per model [default: 4]."),
    option("--max-batch", click.IntRange(1), "Maximum answers per batch; 1: no batching [default: 8]."),
    option("--queue", click.IntRange(0), "Maximum waiting requests; further ones get status 429 [default: 32]."),
    option("--max-tokens", click.IntRange(1), "Maximum tokens per answer [default: 1024]."),
    option("--max-body", click.IntRange(1), "Maximum request size, images included [default: 33.6].", metavar="MB"),
    option(
        "--timeout",
        float,
        "Time limit per request, waiting included [default: 600].",
        callback=_amount,
        metavar="SECONDS",
    ),
    option(
        "--stall-timeout",
        float,
        "Exit if a single graph run takes longer than this [default: 600, or --timeout if longer].",
        callback=_amount,
        metavar="SECONDS",
    ),
    option(
        "--grace",
        float,
        "Time for running answers to finish after Ctrl-C or SIGTERM [default: 30].",
        callback=_amount,
        metavar="SECONDS",
    ),
    option(
        "--kv-cache",
        float,
        "Memory for K and V, in use and kept for later turns [default: 2.1].",
        callback=_amount,
        metavar="GB",
    ),
    option(
        "--memory", float, "Memory limit of all loaded bundles [default: free memory].", callback=_amount, metavar="GB"
    ),
    option(
        "--adapt reports",
        Path,
        "For requests with a deadline, choose K and reductions by load from the methods "
        "in this report.json of vtx-eval; one report per bundle.",
        multiple=True,
        metavar="REPORT",
    ),
    option(
        "--max-accuracy-drop",
        1.0,
        "With --adapt: accuracy that a method may lose against the best, in percentage points.",
        type=click.FloatRange(0, 100),
    ),
    option(
        "--image-host image_hosts",
        str,
        "Also fetch images over https from this host [default: data URLs only].",
        multiple=True,
        metavar="HOST",
    ),
    option(
        "--allow-origin origins",
        str,
        "Allow requests from pages of this origin, e.g. http://localhost:3000.",
        multiple=True,
        metavar="URL",
    ),
    option(
        "--api-keys",
        Path,
        "File of API keys, one per line, each KEY or NAME KEY [share=GROUP] [requests=N] "
        "[answers=N] [tokens=N] [priority=N] [metrics]; clients must send one of them.",
        metavar="FILE",
    ),
    option(
        "--trusted-proxy proxies",
        str,
        "Believe X-Forwarded-For and X-Forwarded-Proto of this proxy, an IP address "
        "or network, e.g. 10.0.0.0/8; *: whoever connects [default: nobody].",
        multiple=True,
        metavar="ADDRESS",
    ),
    option("--unix-socket", Path, "Listen on this Unix socket instead of --host and --port.", metavar="PATH"),
    option(
        "--tls-cert", Path, "Serve https with this certificate chain, PEM; its key is in --tls-key.", metavar="FILE"
    ),
    option("--tls-key", Path, "The private key of --tls-cert, PEM, without a password.", metavar="FILE"),
    option(
        "--otlp",
        str,
        "Send OpenTelemetry spans of each request to the OTLP collector at this address, e.g. http://localhost:4318.",
        metavar="URL",
    ),
    option("--access-log", click.Choice(["text", "json"]), "Write one line per request to stdout."),
    option("--no-auth", bool, "Serve other machines without a key: whoever reaches the port may ask."),
    option("--lenient", bool, "Ignore unsupported fields and values; usage.vtx.ignored lists them."),
    "device",
    "compute",
    "threads",
    "fit",
    "max_tiles",
    "max_pixels",
    "require_signature",
    record=ServeSettings,
)
def serve(settings: ServeSettings) -> None:
    """Serve bundles over an OpenAI-compatible API and a test page.

    If $VTX_API_KEY is set, clients must send it as their key.
    """
    require_http()
    from vtx.runtime.server.app import make_app
    from vtx.runtime.server.drain import DrainingServer
    from vtx.runtime.server.folder import BundleFolder
    from vtx.runtime.server.keys import Keys
    from vtx.runtime.server.protocol import CONNECTIONS
    from vtx.runtime.server.watchdog import Watchdog, systemd

    keys = Keys(given_keys(settings.api_keys))
    check_openness(settings, keys)
    check_tls(settings.tls_cert, settings.tls_key)
    of_app = app_settings(settings, keys)
    trusted = checked_proxies(settings.proxies)
    reserve_descriptors(CONNECTIONS)
    notify, interval = systemd()
    limits = limits_of(settings)
    engines = engines_of(settings, limits)
    with ExitStack() as opening:
        at = opening.enter_context(settings.listening())
        folder = None if settings.folder is None else BundleFolder(engines, settings.folder, note)
        for name in engines.names[:1]:
            with engines.use(engines.acquire(name)):  # reports its errors now
                pass
        for card in (engine.model.loaded.card for engine in engines.loaded):
            if card:
                note(card.in_words)
        note(f"serving {', '.join(engines.names) or 'no bundle yet'} at {settings.address(at)}; Ctrl-C ends")
        watchdog = Watchdog(engines.silences, limits.stall_seconds, end_now, notify, look_seconds=interval)
        of_app = replace(of_app, watchdog=watchdog)
        if settings.access_log:
            of_app = logged(of_app, opening.enter_context(access_output()))
        opening.enter_context(queued_stderr())
        if folder is not None:
            opening.enter_context(folder.followed())
        logging.getLogger("vtx").setLevel(logging.INFO)
        if hasattr(signal, "SIGHUP"):
            reloading = partial(reload, engines, keys, settings.api_keys)
            signal.signal(signal.SIGHUP, lambda *_: Thread(target=reloading, daemon=True).start())
        config = config_of(settings, make_app(engines, limits, of_app), trusted)
        DrainingServer(config, of_app.traffic, engines.close, limits.grace_seconds).run(sockets=[at])


def check_openness(settings: ServeSettings, keys: Keys) -> None:
    """Refuse to serve other machines without a key, and origins that are none. Raises RequestError."""
    if not settings.local and settings.unix_socket is None and not keys and not settings.no_auth:
        raise RequestError(
            f"--host {settings.host} lets other machines ask; set {KEY} to a key that they must send, or add --no-auth"
        )
    for origin in settings.origins:
        if not re.fullmatch(r"https?://[^/\s]+|\*", origin):
            raise RequestError(f"--allow-origin {origin!r:.80} is not an origin, e.g. http://localhost:3000, or *")


def limits_of(settings: ServeSettings) -> Limits:
    """The server's limits: the defaults, changed by options."""
    from vtx.runtime.server.limits import Limits

    stall_seconds = settings.stall_timeout
    if stall_seconds is None:
        stall_seconds = max(Limits().stall_seconds, settings.timeout or 0)
    changes = {
        "parallel": settings.parallel,
        "batch": settings.max_batch,
        "queue": settings.queue,
        "new_tokens": settings.max_tokens,
        "seconds": settings.timeout,
        "body": None if settings.max_body is None else settings.max_body * 10**6,
        "stall_seconds": stall_seconds,
        "grace_seconds": settings.grace,
        "kv": None if settings.kv_cache is None else int(settings.kv_cache * 1e9),
    }
    return Limits(**{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]


def engines_of(settings: ServeSettings, limits: Limits) -> Engines:
    """The bundles to serve, not yet loaded."""
    from vtx.runtime.scheduler.choosing import choosers_of
    from vtx.runtime.server.engines import Engines, Serving, named

    bundles = settings.bundles
    if settings.hub_model or settings.precision or not (bundles or settings.folder):
        bundle = find_bundle(os.environ.get("VTX_BUNDLE"), (), settings.hub_model, settings.precision)
        bundles = (f"{settings.hub_model}={bundle}" if settings.hub_model else str(bundle),)
    folders = named(bundles)
    loading = settings.loading
    return Engines(
        folders,
        loading.load,
        limits,
        None if settings.memory is None else int(settings.memory * 1e9),
        Serving(
            needed=partial(needed_by, loading),
            key=loading.key,
            fit=loading.fit,
            choosers=choosers_of(settings.reports, settings.max_accuracy_drop, folders),
            verify=verified,
            aliases=aliases_of(settings.aliases),
        ),
    )


def needed_by(loading: Loading, bundle: Bundle) -> int:
    """Bytes of memory that a bundle needs when it is loaded in this way."""
    from vtx.runtime.api.images import ImageOptions
    from vtx.runtime.api.load import choose_for, memory_of

    images = ImageOptions(loading.fit, loading.max_tiles, loading.max_pixels)
    return memory_of(bundle, choose_for(bundle, loading.device, loading.compute, images), images)


def app_settings(settings: ServeSettings, keys: Keys) -> AppSettings:
    """The settings of the application that options give. Raises VtxError."""
    from vtx.runtime.server.settings import AppSettings
    from vtx.runtime.server.tracing import Tracing, sent_to

    return AppSettings(
        keys,
        local_hosts=settings.unix_socket is None and settings.local,
        image_hosts=checked_hosts(settings.image_hosts),
        origins=settings.origins,
        lenient=settings.lenient,
        access_json=settings.access_log == "json",
        tracing=None if settings.otlp is None else Tracing(sent_to(settings.otlp)),
    )


def logged(settings: AppSettings, access: Output) -> AppSettings:
    """The settings with a line of each request to `access`, and the number of lines that were dropped."""
    return replace(
        settings,
        access=lambda line: access.put(line.encode()),
        figures=lambda: {"log_lines_dropped_total": access.dropped + access.failed},
    )


def config_of(settings: ServeSettings, app: App, trusted: list[str]) -> Config:
    """The configuration of uvicorn."""
    from uvicorn import Config

    from vtx.runtime.server.protocol import CONNECTIONS, BoundedProtocol

    return Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http=BoundedProtocol,
        log_config=None,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        timeout_keep_alive=30,
        proxy_headers=bool(trusted),
        forwarded_allow_ips=trusted,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def aliases_of(specs: tuple[str, ...]) -> dict[str, str]:
    """Bundles' names by their aliases. Raises RequestError."""
    aliases = dict[str, str]()
    for spec in specs:
        alias, _, name = spec.partition("=")
        if not alias or not name or alias in aliases:
            raise RequestError(f"--alias {spec!r:.80} must be a new ALIAS=NAME, e.g. gpt-4o=demo")
        aliases[alias] = name
    return aliases


def require_http() -> None:
    """Raise DeviceError if what serves HTTP is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as e:
        raise DeviceError(f"{e.name} is not installed; {install('serve')}") from e


def given_keys(file: Path | None) -> dict[str, Tenant]:
    """The tenants by the keys of the environment and of a file.

    Raises RequestError for a file without any, or a malformed line.
    """
    from vtx.runtime.bundle.files import read_text_file
    from vtx.runtime.prompt.text import utf8
    from vtx.runtime.server.keys import Tenant, check_key, read_keys

    tenants: dict[str, Tenant] = {}
    if key := os.environ.get(KEY):
        tenants[check_key(key, KEY)] = Tenant(KEY, KEY, metrics=True)
    if file is not None:
        tenants |= read_keys(utf8(read_text_file(file, 1 << 20), file.name, RequestError), file.name)
    return tenants


def verified(model: Model) -> None:
    """Raise BundleError for a model that does not compute its golden vectors."""
    from vtx.runtime.report.golden import check_golden

    for check in check_golden(model):
        if not check.passed:
            raise BundleError(
                f"{check.name} differs by {check.difference:.2g} from the golden vectors, the limit is "
                f"{check.limit:.2g}; run vtx-doctor on the bundle"
            )


def reload(engines: Engines, keys: Keys, file: Path | None) -> None:
    """Accept the keys that the file has now and serve bundles that have changed on disk; what was done is printed."""
    if file is not None:
        try:
            keys.replace(given_keys(file))
            note(f"{file.name} was read again")
        except VtxError as e:
            note(f"the keys were not replaced: {e}")
    for line in engines.reload():
        note(line)


def descriptor_of(stream: TextIO | None) -> int | None:
    """The descriptor of a standard stream; None if it is closed, or a program has put another object in its place."""
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


@contextmanager
def access_output() -> Iterator[Output]:
    """The access log's way to stdout. Raises RequestError if there is no stdout."""
    from vtx.runtime.server.delivery import Output, writer

    descriptor = descriptor_of(sys.stdout)
    if descriptor is None:
        raise RequestError("--access-log writes to stdout, which is closed; redirect it to a file")
    output = Output("the access log", writer(descriptor))
    try:
        yield output
    finally:
        output.close()


@contextmanager
def queued_stderr() -> Iterator[None]:
    """Write what is logged to stderr in a thread of its own, so that the server answers although nobody reads it."""
    from vtx.runtime.server.delivery import Output, QueuedLog, writer

    descriptor = descriptor_of(sys.stderr)
    if descriptor is None:
        yield
        return
    output = Output("stderr", writer(descriptor))
    handler = QueuedLog(output)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        output.close()


def end_now(message: str) -> NoReturn:
    """End the process, whose threads no longer answer, with the stack of each, also if nobody reads stderr."""
    ending = Timer(FLUSH_SECONDS, os._exit, (1,))
    ending.daemon = True
    ending.start()
    faulthandler.dump_traceback()
    note(f"vtx-serve: {message}")
    os._exit(1)


def checked_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Names of hosts in lower case. Raises RequestError for anything else, such as an address."""
    for host in hosts:
        if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", host.lower()) or host.rpartition(".")[2].isdigit():
            raise RequestError(f"--image-host {host!r:.80} is not a host name, e.g. pictures.example.org")
    return tuple(host.lower() for host in hosts)


def checked_proxies(proxies: tuple[str, ...]) -> list[str]:
    """Addresses and networks of proxies. Raises RequestError for anything else but *."""
    for proxy in proxies:
        try:
            if proxy != "*":
                ipaddress.ip_network(proxy)
        except ValueError as e:
            raise RequestError(f"--trusted-proxy {proxy!r:.80} is not an IP address or network ({e})") from e
    return list(proxies)


def reserve_descriptors(connections: int) -> None:
    """Allow the process as many open files as connections and bundles need. Raises RequestError if it may not."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise RequestError(f"the process may open {hard} files, a server needs {needed}; raise `ulimit -n`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def listening(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises RequestError if it is not available."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as closing:
            at = closing.enter_context(socket.socket(family, kind, proto))
            at.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            at.bind(address)
            at.listen()
            closing.pop_all()
            return at
    except OSError as e:
        raise RequestError(f"cannot listen at {host} port {port} ({e.strerror or e}); choose another --port") from e


def listening_at(path: Path) -> socket.socket:
    """A Unix socket at this path, in place of one that nobody listens at. Raises RequestError if it cannot be made."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            if path.is_socket() and other.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
        with ExitStack() as closing:
            at = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            at.bind(str(path))
            at.listen()
            closing.pop_all()
            return at
    except OSError as e:
        raise RequestError(f"cannot listen at {path} ({e.strerror or e}); remove it, or choose another path") from e


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raise RequestError for a certificate without its key, or that cannot be used."""
    if (cert is None) != (key is None):
        raise RequestError("--tls-cert and --tls-key belong together; give both")
    if cert is None or key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, lambda: "")
    except (OSError, ValueError) as e:
        raise RequestError(f"{cert} and {key} are no certificate and its key as PEM files: {e}") from e


def page_url(host: str, at: socket.socket, *, tls: bool = False) -> str:
    """The URL of the page."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}/"
