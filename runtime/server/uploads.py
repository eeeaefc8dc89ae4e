"""The bodies of requests on their way and in memory, bounded in number and bytes, of each client and in total."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vtx.runtime.backends.allocation import return_freed_memory
from vtx.runtime.server.http import Receive, Scope, read_json_body
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal, no_room

FREE_BYTES = 64 << 10  # of each body, which count for no limit, so that large bodies hold up no small ones
LARGE_BYTES = 1 << 20  # in memory, until which the allocator may keep what was freed


@dataclass(eq=False, slots=True)
class Upload:
    """A body of a client, of which `bytes` are in memory. `reading` runs until all of it is there."""

    client: str
    bytes: int = 0
    reading: asyncio.Task[bytearray] | None = field(default=None)
    refusal: Refusal | None = None


class Uploads:
    """The uploads of a server, the oldest first. The thread of the connections uses it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._uploads = list[Upload]()

    @property
    def bytes(self) -> int:
        """Bytes of all bodies in memory."""
        return sum(upload.bytes for upload in self._uploads)

    @contextmanager
    def begin(self, client: str) -> Iterator[Upload]:
        """An upload that counts until the end of the block, or until `forget`.

        Of too many the one that has been on its way for longest ends, of this client first. Raises Refusal (429) if
        all have arrived and wait to be read.
        """
        for uploads, most in (
            ([upload for upload in self._uploads if upload.client == client], self._limits.client_uploads),
            (self._uploads, self._limits.uploads),
        ):
            if len(uploads) >= most:
                self._end_oldest(uploads, most)
        upload = Upload(client)
        self._uploads.append(upload)
        try:
            yield upload
        finally:
            self.forget(upload)

    async def read(self, upload: Upload, scope: Scope, receive: Receive) -> bytearray:
        """The body, as `read_json_body` gives it.

        Raises what that raises; Refusal (408) if it had to end for others.
        """
        upload.reading = asyncio.ensure_future(
            read_json_body(scope, receive, self._limits, lambda size: self._hold(upload, size))
        )
        try:
            return await upload.reading
        except asyncio.CancelledError:
            if upload.refusal is None:
                raise
            raise upload.refusal from None
        finally:
            upload.reading.cancel()
            upload.reading = None

    def forget(self, upload: Upload) -> None:
        """Its body is no longer in memory."""
        if upload in self._uploads:
            self._uploads.remove(upload)
            if upload.bytes >= LARGE_BYTES and self.bytes < LARGE_BYTES:
                asyncio.get_running_loop().call_soon(return_freed_memory)

    def _hold(self, upload: Upload, size: int) -> bool:
        """True if there is room for a body of `size` bytes so far."""
        of_client = [other for other in self._uploads if other.client == upload.client]
        for uploads, bodies in ((of_client, (self._limits.bodies + 1) // 2), (self._uploads, self._limits.bodies)):
            others = sum(other.bytes for other in uploads if other is not upload)
            if size > FREE_BYTES and others + size > bodies * self._limits.body:
                upload.bytes = 0
                return False
        upload.bytes = size
        return True

    def _end_oldest(self, uploads: list[Upload], most: int) -> None:
        oldest = next((upload for upload in uploads if upload.reading is not None), None)
        if oldest is None or oldest.reading is None:
            raise no_room(f"{most} bodies of requests are being read, the limit")
        oldest.refusal = Refusal(
            408, f"the request had not arrived when {most} more came, the limit; send it faster, or fewer at a time"
        )
        oldest.reading.cancel()
        self.forget(oldest)


def network_of(address: str) -> str:
    """The client at an address: an IPv4 address, or the 64 bits of an IPv6 address that one client has to itself.

    What is no address, as a trusted proxy may give, is a client by itself.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
