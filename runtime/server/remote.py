"""Images at addresses: from hosts that are allowed by name, over TLS, from public addresses, without redirects."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from vtx.runtime.errors import RequestError
from vtx.runtime.server.refusal import Refusal

PORT = 443
MAX_URL = 2048
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # IPv4 behind a gateway, private addresses too
Connect = Callable[[str, float], socket.socket]


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that is still to be fetched: `target` is path and query."""

    host: str
    target: str


def remote_image(url: str, hosts: Collection[str]) -> RemoteImage:
    """The image at an address of an allowed host. Raises RequestError for any other address."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise RequestError(f"an image's address must be at most {MAX_URL} printable ASCII characters, without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError as e:
        raise RequestError(f"{url!r:.80} is not an address ({e})") from e
    if parts.scheme != "https" or parts.username is not None or parts.password is not None or port != PORT:
        raise RequestError(f"{url!r:.80}: only https addresses are fetched, without a user and at port {PORT}")
    if parts.hostname is None or parts.hostname not in hosts:
        raise RequestError(f"{url!r:.80}: this server fetches images from {', '.join(sorted(hosts))} and nowhere else")
    return RemoteImage(parts.hostname, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def connect_public(host: str, seconds: float) -> socket.socket:
    """A TLS connection to a host, all of whose addresses are public; to the address that was checked.

    Raises OSError if it cannot be reached, or its certificate is not valid; Refusal if an address of it is private.
    """
    addresses = socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)
    if not addresses or not all(is_public(str(address[0])) for *_, address in addresses):
        raise Refusal(400, f"{host} has an address that is not public; only public ones are used", param="messages")
    family, kind, proto, _, address = addresses[0]
    with socket.socket(family, kind, proto) as raw:
        raw.settimeout(seconds)
        raw.connect(address)
        return ssl.create_default_context().wrap_socket(raw, server_hostname=host)


def is_public(address: str) -> bool:
    """True for an IP address of the public internet that does not lead to a private one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.sixtofour is not None or ip.teredo is not None or ip in TRANSLATED:
            return False
    return ip.is_global and not ip.is_multicast


def fetch(image: RemoteImage, limit: int, seconds: float, connect: Connect = connect_public) -> bytes:
    """The bytes at an address, at most `limit`, within `seconds`. Raises Refusal."""
    end = time.monotonic() + seconds
    try:
        with connect(image.host, seconds) as connection:

            def hang_up() -> None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

            ending = threading.Timer(end - time.monotonic(), hang_up)  # ends the reading, however slow it is
            ending.start()
            try:
                content = _fetched(image, limit, connection)
            finally:
                ending.cancel()
        if time.monotonic() >= end:
            raise TimeoutError
    except (OSError, ValueError, http.client.HTTPException) as e:
        reason = "took too long" if time.monotonic() >= end else f"failed ({type(e).__name__})"
        raise _refused(image, f"fetching it {reason}; send it as a data URL") from e
    return content


def _fetched(image: RemoteImage, limit: int, at: socket.socket) -> bytes:
    connection = http.client.HTTPConnection(image.host)
    connection.sock = at
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "vtx-serve"}
    connection.request("GET", image.target, headers=headers)
    with connection.getresponse() as response:
        if response.status != 200:
            raise _refused(image, f"its host says {response.status}, and redirects are not followed")
        content = response.read(limit + 1)
        if len(content) > limit:
            raise _refused(image, f"it is over {limit:,} bytes, the limit; send it smaller", 413)
        if response.length:
            raise http.client.IncompleteRead(content, response.length)
        return content


def _refused(image: RemoteImage, why: str, status: int = 400) -> Refusal:
    return Refusal(status, f"the image at {image.host}: {why}", code="invalid_image_url", param="messages")
